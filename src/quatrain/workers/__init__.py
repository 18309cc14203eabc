"""Users' code in processes with limits."""
