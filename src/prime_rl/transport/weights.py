"""Published weights: one Hugging Face or PEFT directory per version, with a manifest of tensor digests."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.transport.canary import Canary, write_canary
from rollouts.training.json_files import read_json_file
from rollouts.training.manifests import (
    Manifest,
    TensorEntry,
    build_manifest,
    describe_tensors,
    read_index,
    read_manifest,
    write_manifest,
)
from rollouts.training.model_config import GENERATION_FILE
from rollouts.training.steps import is_due, prune_steps, publish_step
from rollouts.training.tensor_files import save_tensors

if TYPE_CHECKING:
    from torch import Tensor


WEIGHTS_FILE = "model.safetensors"
ADAPTER_WEIGHTS_FILE, ADAPTER_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
PEFT_PREFIX = "base_model.model."
"""Prefix of PEFT's parameter names."""
PLAIN_LORA: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),  # others change the frozen weights
    **dict.fromkeys(
        "use_dora use_qalora use_bdlora lora_bias fan_in_fan_out rank_pattern alpha_pattern target_parameters "
        "layer_replication alora_invocation_tokens".split(),
        (),
    ),
}
"""PEFT settings that change what the tensors mean, with their values in plain LoRA; unset ones are plain."""
CONVERSION = "write it with peft's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
TEMPLATE_FILE, FURTHER_TEMPLATES = "chat_template.jinja", "additional_chat_templates/*.jinja"
TOKENIZER_FILES = (
    "tokenizer*",
    "*tokens*.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.jinja",
    "chat_template.json",
    FURTHER_TEMPLATES,
)


@dataclass(frozen=True)
class ModelFiles:
    """The small files of a model directory, in memory because the directory may be removed during the run."""

    config: dict[str, Any]
    """The contents of `config.json`."""
    files: dict[str, bytes]
    """Tokenizer, chat templates and generation defaults by path below the directory."""

    def write(self, directory: Path) -> None:
        """Write `files` into a directory."""
        for name, data in self.files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(data)


def read_model_files(
    model_dir: Path,
    tokenizer_dir: Path | None = None,
    chat_template: str | None = None,
    eos_ids: Sequence[int] = (),
) -> ModelFiles:
    """Read the files that a published version needs besides its tensors.

    `tokenizer_dir`, `chat_template` and `eos_ids` override those of `model_dir`.
    """
    config = read_json_file(model_dir / "config.json")
    files = {**_read(model_dir, (GENERATION_FILE,)), **_read(tokenizer_dir or model_dir, TOKENIZER_FILES)}
    if chat_template is not None:  # also for the chats that would have one of the others
        files = {name: data for name, data in files.items() if not Path(name).match(FURTHER_TEMPLATES)}
        files[TEMPLATE_FILE] = chat_template.encode()
    if eos_ids:
        generation = json.loads(files.get(GENERATION_FILE, "{}")) | {"eos_token_id": list(eos_ids)}
        files[GENERATION_FILE] = _format_json(generation)
    return ModelFiles(config, files)


def _read(source: Path, patterns: tuple[str, ...]) -> dict[str, bytes]:
    paths = sorted({path for pattern in patterns for path in source.glob(pattern) if path.is_file()})
    return {path.relative_to(source).as_posix(): path.read_bytes() for path in paths}


def publish_weights(
    root: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    model: Path | ModelFiles,
    *,
    num_layers: int | None = None,
    tie_word_embeddings: bool | None = None,
    adapter_config: Mapping[str, Any] | None = None,
    canary: Canary | None = None,
) -> Path:
    """Publish `root/step_N`: safetensors, config and tokenizer of `model` (a directory or its files), and a manifest.

    `num_layers` and `tie_word_embeddings` override the config if given. The result can be loaded by
    `AutoModelForCausalLM.from_pretrained` and engines. With `adapter_config` the tensors are a PEFT adapter with PEFT
    names, loadable by `peft` and engines on top of the base model. `canary` is written too.
    """

    source = read_model_files(model) if isinstance(model, Path) else model

    def write(directory: Path) -> None:

        cpu_tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        file = WEIGHTS_FILE if adapter_config is None else ADAPTER_WEIGHTS_FILE
        save_tensors(cpu_tensors, directory / file, metadata={"format": "pt"})
        if adapter_config is not None:
            _write_json(directory / ADAPTER_CONFIG_FILE, adapter_config)
        config = adapt_config(source.config, cpu_tensors, num_layers)
        if adapter_config is None:
            config.pop("quantization_config", None)  # that of an adapter describes its base model
        if tie_word_embeddings is not None:
            config["tie_word_embeddings"] = tie_word_embeddings
        _write_json(directory / "config.json", config)
        source.write(directory)
        if canary is not None:
            write_canary(directory, canary)
        write_manifest(directory, build_manifest(step, cpu_tensors))

    return publish_step(Path(root), step, write)


def check_adapter_config(config: Mapping[str, Any], source: str) -> None:
    """Raise `ValueError`, naming `source`, if PEFT's `config` is not of plain LoRA, or lacks rank or scale."""
    for key, values in PLAIN_LORA.items():
        if config.get(key) and config[key] not in values:
            cure = f": {CONVERSION}" if key == "init_lora_weights" else ""
            raise ValueError(f"{source}: {key} = {config[key]!r} is not plain LoRA, the only supported kind{cure}")
    for key, kinds in {"r": int, "lora_alpha": int | float}.items():
        if isinstance(config.get(key), bool) or not isinstance(config.get(key), kinds) or config[key] <= 0:
            raise ValueError(f"{source}: {key} must be a positive number, got {config.get(key)!r}")


def is_adapter(directory: Path) -> bool:
    """Whether a published directory contains an adapter instead of a full model."""
    return (Path(directory) / ADAPTER_CONFIG_FILE).is_file()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_bytes(_format_json(value))


def _format_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(dict(value), indent=2) + "\n").encode()


def adapt_config(config: dict[str, Any], tensors: Mapping[str, Tensor], num_layers: int | None) -> dict[str, Any]:
    """Adapt `config.json` to the published tensors: dtype (of most elements), number of layers."""
    adapted = {key: value for key, value in config.items() if key != "dtype"}
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    if sizes:
        adapted["torch_dtype"] = sizes.most_common(1)[0][0]
    if num_layers is not None:
        adapted["num_hidden_layers"] = num_layers
        if isinstance(adapted.get("layer_types"), list):
            adapted["layer_types"] = adapted["layer_types"][:num_layers]
    return adapted


def verify_tensors(tensors: Mapping[str, Tensor], manifest: Manifest) -> dict[str, str]:
    """Check that tensors match the manifest exactly; returns their digests.

    Raises `ValueError` naming the first tensors that are missing, unexpected or different.
    """
    return _verify(describe_tensors(tensors), manifest)


def _verify(entries: Mapping[str, TensorEntry], manifest: Manifest) -> dict[str, str]:
    names = entries.keys() | manifest.tensors.keys()
    wrong = sorted(name for name in names if entries.get(name) != manifest.tensors.get(name))
    if wrong:
        shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise ValueError(f"weights of step {manifest.step} do not match their manifest: {shown}")
    return {name: entry.digest for name, entry in entries.items()}


def check_directory(directory: Path) -> tuple[int, dict[str, str]]:
    """Verify the files of a published directory against its manifest; returns step and digests.

    Raises `ValueError` as `verify_tensors` does, if a file is unreadable, or if an index names other files.
    """
    from safetensors import SafetensorError, safe_open

    manifest = read_manifest(directory)
    read_index(directory)
    entries: dict[str, TensorEntry] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - a handle is not a mapping
                    entries |= describe_tensors({name: handle.get_tensor(name)})
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
    return manifest.step, _verify(entries, manifest)


def prune_weights(
    root: Path, latest: int, max_async_level: int, ckpt_interval: int | None, final: int | None, start: int = 0
) -> list[int]:
    """Remove versions that are no longer needed; returns them.

    Retained are the last `max_async_level + 2` up to `latest` (engines may still be loading one of them), every
    `ckpt_interval`-th (a resumed run starts engines from it), the `final` step, and everything newer than `latest`;
    in a run resumed after step `start` also that version and those retained by earlier attempts before it.
    """
    window = max_async_level + 1
    return prune_steps(
        root,
        lambda step: (
            step >= latest - window or is_due(step, ckpt_interval, final) or step == start or step < start - window
        ),
    )
