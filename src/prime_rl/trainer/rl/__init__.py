"""The RL trainer: batches of samples in, policy versions out."""
