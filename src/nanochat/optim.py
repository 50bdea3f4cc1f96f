"""Combined nanochat optimizer: Muon for block matrices, AdamW for embedding and head."""

from __future__ import annotations

import torch

from nanochat.gpt import GPT
from rollouts.training.backends.muon import JoinedOptimizer, MatrixMuon

TUNED_WIDTH = 768
"""Reference width of the AdamW learning rates, which scale with 1 / sqrt(width)."""


def build_optimizer(
    model: GPT,
    *,
    unembedding_lr: float = 0.004,
    embedding_lr: float = 0.2,
    matrix_lr: float = 0.02,
    weight_decay: float = 0.0,
) -> JoinedOptimizer:
    """Groups "head", "embedding" and "matrices", each with its own learning rate; weight decay is AdamW's.

    Muon scales an update by sqrt(max(1, rows / columns)), AdamW's rates are multiplied by (width / 768)^-0.5.
    """
    scale = (model.config.n_embd / TUNED_WIDTH) ** -0.5
    adamw = torch.optim.AdamW(
        [
            {"name": "head", "params": [model.lm_head.weight], "lr": unembedding_lr * scale},
            {"name": "embedding", "params": [model.transformer["wte"].weight], "lr": embedding_lr * scale},
        ],
        betas=(0.8, 0.95),
        eps=1e-10,
        weight_decay=weight_decay,
        fused=True,
    )
    muon = MatrixMuon(
        [{"name": "matrices", "params": list(model.transformer["h"].parameters())}],
        {"lr": matrix_lr, "momentum": 0.95, "nesterov": True, "weight_decay": 0.0, "adjust_lr": "original"},
    )
    return JoinedOptimizer([adamw, muon])
