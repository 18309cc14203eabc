"""Commands: they read arguments, call `loop` or `report`, and print."""
