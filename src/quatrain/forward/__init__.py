"""A pass without gradient over packed micro-batches: log-probabilities, values and scores."""
