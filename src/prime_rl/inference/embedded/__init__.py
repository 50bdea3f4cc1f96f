"""Embedded engine: serves the trainer's own model code."""
