"""The integration run on two FSDP ranks: torchrun --nproc-per-node=2 dev/integration_training/train.py this file."""

from __future__ import annotations

from dataclasses import replace

from config import config as single

config = replace(single, gpu_ranks=(0, 1), output_dir="outputs/integration_training_fsdp")
