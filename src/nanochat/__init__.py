"""The nanochat model family: a small GPT, its tokenizer, optimizers, engine and checkpoints."""
