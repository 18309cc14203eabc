"""What a run will need, before it starts: its batches, and the memory of each device."""
