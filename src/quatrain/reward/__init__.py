"""Stage 2 of a training step: computes rewards of completions."""
