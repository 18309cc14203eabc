"""Model families, parameters, decoder, KV cache and attention."""
