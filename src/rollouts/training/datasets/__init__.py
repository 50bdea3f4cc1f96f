"""Where training data comes from: a cursor over prompts, conversations as samples."""

from __future__ import annotations

from rollouts.training.datasets.data_buffer import (
    DataBuffer,
    create_buffer_from_jsonl,
    load_prompts_from_jsonl,
    load_prompts_from_list,
)
from rollouts.training.datasets.sft import load_sft_dataset

__all__ = [
    "DataBuffer",
    "create_buffer_from_jsonl",
    "load_prompts_from_jsonl",
    "load_prompts_from_list",
    "load_sft_dataset",
]
