"""Model files: GGUF, Hugging Face directories, Orbax checkpoints, tokenizers."""
