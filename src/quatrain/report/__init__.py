"""Output of a run: metrics, samples, log and progress display."""
