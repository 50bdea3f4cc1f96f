"""The nanochat family: a small GPT, its tokenizer, optimizers, engine and checkpoints, standing on the library."""
