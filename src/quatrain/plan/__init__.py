"""Computes a run's batch sizes and the memory needed on each device, before the run starts."""
