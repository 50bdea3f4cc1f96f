"""Loads LoRA adapters from PEFT directories and verifies them against their manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.inference.engine import AdapterSpec
from prime_rl.transport.weights import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, check_adapter_config, verify_tensors
from rollouts.training.json_files import read_json_file
from rollouts.training.manifests import MANIFEST_FILE, read_manifest
from rollouts.training.model_config import GENERATION_FILE, read_eos_ids
from rollouts.training.steps import is_complete, parse_step

if TYPE_CHECKING:
    from torch import Tensor

POLICY = "policy"
"""Name of the adapter loaded by /update_weights; it then serves requests for the base model name."""
NEXT_POLICY = "next policy"
"""Name of an adapter until its base model is loaded too."""


def read_adapter(directory: Path, version: int | None = None) -> tuple[dict[str, Tensor], AdapterSpec]:
    """Load the tensors and spec of an adapter; its version is the manifest's.

    With `version`, an adapter saved by `peft` (not published by a trainer) needs no manifest and gets that version.
    `ValueError` if it is incomplete, corrupt, not plain LoRA, or lacks a manifest.
    """
    path = directory / ADAPTER_CONFIG_FILE
    if not path.is_file() or not (directory / ADAPTER_WEIGHTS_FILE).is_file():
        raise ValueError(f"{directory} is not an adapter: {ADAPTER_CONFIG_FILE} or {ADAPTER_WEIGHTS_FILE} is missing")
    config = read_json_file(path)
    tensors = _read_file(directory / ADAPTER_WEIGHTS_FILE)
    is_published = is_complete(directory) or parse_step(directory.name) is not None
    if version is None or is_published or (directory / MANIFEST_FILE).is_file():
        manifest = read_manifest(directory)
        if not is_complete(directory):
            raise ValueError(f"{directory} is incomplete: it has no STABLE marker")
        verify_tensors(tensors, manifest)
        version = manifest.step
    spec = build_spec(config, version, str(path))
    return tensors, replace(spec, eos_ids=frozenset(read_eos_ids(directory / GENERATION_FILE)))


def build_spec(config: Mapping[str, Any], version: int, source: str) -> AdapterSpec:
    """Extract rank and scaling from PEFT's `config`. `ValueError` naming `source` if it is not plain LoRA."""
    check_adapter_config(config, source)
    if config.get("modules_to_save"):
        raise ValueError(f"{source}: modules_to_save = {config['modules_to_save']!r} cannot be served: leave it out")
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    if config.get("use_rslora"):
        alpha *= rank**0.5  # rsLoRA scale alpha / sqrt(rank), expressed as alpha / rank
    return AdapterSpec(rank=rank, alpha=alpha, version=version)


def _read_file(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
