"""Training data: prompt buffer, data files, chat rendering and SFT samples."""

from __future__ import annotations

from rollouts.training.datasets.data_buffer import (
    DataBuffer,
    create_buffer_from_jsonl,
    load_prompts_from_jsonl,
    load_prompts_from_list,
)
from rollouts.training.datasets.prompts import load_dataset_with_answers, load_rl_prompts
from rollouts.training.datasets.sample_files import (
    export_samples_to_huggingface_format,
    export_samples_to_jsonl,
    load_samples_from_jsonl,
)
from rollouts.training.datasets.sft import (
    compute_loss_mask,
    load_sft_dataset,
    prepare_sft_sample,
    tokenize_conversation,
)

__all__ = [
    "DataBuffer",
    "compute_loss_mask",
    "create_buffer_from_jsonl",
    "export_samples_to_huggingface_format",
    "export_samples_to_jsonl",
    "load_dataset_with_answers",
    "load_prompts_from_jsonl",
    "load_prompts_from_list",
    "load_rl_prompts",
    "load_samples_from_jsonl",
    "load_sft_dataset",
    "prepare_sft_sample",
    "tokenize_conversation",
]
