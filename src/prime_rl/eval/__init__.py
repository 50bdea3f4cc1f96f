"""Evaluation of models, servers and series of checkpoints in environments."""
