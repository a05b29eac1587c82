"""Where checkpoints come from: local directories, the Hugging Face hub, GGUF files, or a config alone."""
