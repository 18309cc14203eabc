"""Reading model weights from Hugging Face folders and GGUF files, and writing Hugging Face folders."""
