"""Training processes: RL and SFT on one optimizer step, over the models that the embedded engine serves."""
