"""Machines that hold parameters: gradients in, optimizer steps and checkpoints out."""
