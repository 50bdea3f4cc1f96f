"""The conductor: draws prompts, collects scored rollouts, feeds the trainer and relays its weights to the engines."""
