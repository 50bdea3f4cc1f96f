"""Evaluation: how well a model, a server or a series of checkpoints does in environments."""
