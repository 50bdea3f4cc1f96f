"""The trainer for supervised fine-tuning, on the optimizer step of the RL trainer."""
