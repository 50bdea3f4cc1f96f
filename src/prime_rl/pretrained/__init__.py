"""Pretrained models from files and by name: GGUF in and out, downloads of known models."""
