"""What a check is given, and what it returns."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from dev.gpu.runner import load_results
from torch import Tensor


class Skipped(Exception):
    """A check that cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Measured:
    """The number of a check; further `values` and a `note` for the report."""

    number: float
    note: str = ""
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """Device, sizes and folders of a run: `tiny` sizes take seconds on a CPU; files in `scratch` are not kept."""

    device: torch.device
    tiny: bool
    scratch: Path
    out: Path

    @property
    def dtype(self) -> torch.dtype:
        """Data type of models: bfloat16 on a device."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def gpu(self) -> str:
        """Name of the device."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def folder(self, name: str) -> Path:
        """A new empty folder in `scratch`."""
        path = self.scratch / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def values_of(self, name: str) -> dict[str, float]:
        """The values of an earlier check; `Skipped` without a result."""
        rows = load_results(self.out)
        found = [row for row in rows if row["name"] == name and row["tiny"] == self.tiny and row["values"]]
        if not found:
            raise Skipped(f"needs the result of {name}")
        return dict(found[-1]["values"])


def measure_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest relative error in the Frobenius norm over pairs of tensors."""
    errors = []
    for a, b in zip(found, expected, strict=True):
        a, b = a.detach().double(), b.detach().double().to(a.device)
        errors.append(float((a - b).norm() / b.norm().clamp(min=1e-30)))
    return max(errors)


def write_model(directory: Path, shape: Mapping[str, Any], *, weights: bool = True) -> Path:
    """Write a model directory of this shape with the tokenizer of tiny-qwen3; random weights are in bfloat16."""
    from safetensors.torch import save_file

    from prime_rl.runtime.tokenizer import resolve_model_dir
    from prime_rl.trainer.models.causal_lm import tensor_names
    from prime_rl.trainer.models.registry import load_decoder

    source = resolve_model_dir("tiny-qwen3")
    shutil.copytree(source, directory, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | dict(shape)
    (directory / "config.json").write_text(json.dumps(config))
    if weights:
        model = load_decoder(directory, random_init=True, dtype=torch.bfloat16)
        save_file({name: t.contiguous() for name, t in tensor_names(model).items()}, directory / "model.safetensors")
    return directory


def small_shape(tiny: bool) -> dict[str, Any]:
    """A model small enough for fp64 on a CPU, with attention that every backend supports."""
    sizes = (64, 2, 128, 32) if tiny else (512, 4, 1536, 64)
    hidden, layers, inner, head_dim = sizes
    return {
        "vocab_size": 512 if tiny else 8192,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 2048,
        "initializer_range": 0.05,
    }
