"""Agents: programs of a user that ask the policy over HTTP, and are trained as they are."""
