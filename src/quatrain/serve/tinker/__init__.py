"""A training server: programs of others train adapters of the served model through Tinker's interface."""
