"""A library of protocols and pure functions for SFT and RL training loops."""
