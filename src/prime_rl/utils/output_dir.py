"""Folders of a run below its output_dir that several processes write or read."""

from __future__ import annotations

AVERAGE_DIR = "average"
"""Where a trainer publishes versions of its moving average, in the output directory beside `weights`."""

BROADCASTS_DIR = "broadcasts"
"""Where versions are announced in the output directory that servers receive over a process group."""
