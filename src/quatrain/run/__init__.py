"""What a run keeps: folder, checkpoints, metrics, samples."""
