"""Weights and the files they come from: Hugging Face folders and GGUF files, read and written."""
