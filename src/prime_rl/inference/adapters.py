"""Reading a LoRA adapter from its PEFT directory, checked against what its publisher says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.inference.engine import AdapterSpec
from prime_rl.transport.weights import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    MANIFEST_FILE,
    read_manifest,
    verify_tensors,
)
from rollouts.training.steps import is_complete, parse_step

if TYPE_CHECKING:
    from torch import Tensor

POLICY = "policy"
"""Name of the adapter that /update_weights loads; requests for the model itself are then answered with it."""
PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none", None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "target_parameters": ([], None),
}
"""Settings of PEFT that change what the tensors mean, with the values that leave plain LoRA."""


def read_adapter(directory: Path, version: int | None = None) -> tuple[dict[str, Tensor], AdapterSpec]:
    """Tensors and facts of an adapter; its version is the manifest's, that of `step_N`, or `version`.

    `ValueError` when it is incomplete, damaged, no plain LoRA, or has no version.
    """
    path = directory / ADAPTER_CONFIG_FILE
    if not path.is_file() or not (directory / ADAPTER_WEIGHTS_FILE).is_file():
        raise ValueError(f"{directory} is no adapter: it lacks {ADAPTER_CONFIG_FILE} or {ADAPTER_WEIGHTS_FILE}")
    config = json.loads(path.read_text(encoding="utf-8"))
    tensors = _read_file(directory / ADAPTER_WEIGHTS_FILE)
    step = parse_step(directory.name)
    if (directory / MANIFEST_FILE).is_file():
        if not is_complete(directory):
            raise ValueError(f"{directory} is not complete: it has no STABLE marker")
        manifest = read_manifest(directory)
        verify_tensors(tensors, manifest)
        step = manifest.step
    found = step if step is not None else version
    if found is None:
        raise ValueError(f"{directory} has no version: name it step_N or give it a {MANIFEST_FILE}")
    return tensors, build_spec(config, found, str(path))


def build_spec(config: Mapping[str, Any], version: int, source: str) -> AdapterSpec:
    """The facts of PEFT's `config` that count when serving. `ValueError` naming `source` when it is no plain LoRA."""
    for key, values in PLAIN.items():
        if key in config and config[key] not in values:
            raise ValueError(f"{source}: {key} = {config[key]!r} is not plain LoRA, which is all that can be served")
    rank = int(config["r"])
    alpha = float(config.get("lora_alpha", rank))
    if config.get("use_rslora"):
        alpha *= rank**0.5  # scale alpha / sqrt(rank), told as alpha / rank
    return AdapterSpec(rank=rank, alpha=alpha, version=version)


def _read_file(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
