"""Transports between processes: batches to the trainer, weights to the engines, file notifications."""
