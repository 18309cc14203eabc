"""What a run leaves: metrics, samples, log, progress."""
