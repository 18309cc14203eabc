"""The processes of a run: starting them, connecting them, and reporting a failed process to the others."""
