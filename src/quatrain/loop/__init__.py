"""The training step and what runs it: training, evaluation, supervised training."""
