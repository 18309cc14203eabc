"""Parameters, decoder, model families, loading and saving."""
