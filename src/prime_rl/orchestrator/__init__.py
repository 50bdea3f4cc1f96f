"""The orchestrator: generates scored rollouts, sends batches to the trainer, relays weights to inference servers."""
