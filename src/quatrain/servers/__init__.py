"""Inference servers, asked over HTTP: one client, one table of kinds, one probe."""
