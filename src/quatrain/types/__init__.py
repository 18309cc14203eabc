"""What the stages pass each other: batches, metrics, completions."""
