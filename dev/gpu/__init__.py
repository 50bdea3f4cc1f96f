"""Checks of everything that runs on a GPU: `make gpu`, or `python -m dev.gpu --help`; described in docs/gpu.md."""
