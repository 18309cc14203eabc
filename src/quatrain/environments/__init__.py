"""Episodes of several turns: environments and tools."""
