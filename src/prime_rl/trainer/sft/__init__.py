"""The SFT trainer, on the backend of the RL trainer."""
