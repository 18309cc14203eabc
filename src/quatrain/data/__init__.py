"""Prompts, tokenizers and the offline task."""
