"""Processes of a run: supervision, framing, hang detection, the run directory."""
