"""The wire from trainer to engines: a plain Hugging Face directory per version, with a manifest of what it holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from rollouts.training.steps import complete_steps, prune_steps, publish_step

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 1
MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "model.safetensors"
TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILES = ("generation_config.json",)
TOKENIZER_FILES = (
    "tokenizer*",
    "*tokens*.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.jinja",
    "chat_template.json",
)


class TensorEntry(msgspec.Struct, frozen=True):
    """What a reader must find: dtype as `float32`, shape, and the digest of the bytes."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


class Manifest(msgspec.Struct, frozen=True):
    """The contents of one published version."""

    schema: int
    step: int
    tensors: dict[str, TensorEntry]


def digest_tensor(tensor: Tensor) -> str:
    """xxh3_128 in hex over the contiguous bytes of a tensor, wherever it lives."""
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


def describe_tensors(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """The manifest's rows for `tensors`."""
    return {
        name: TensorEntry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest_tensor(tensor))
        for name, tensor in tensors.items()
    }


def publish_weights(
    root: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    model_dir: Path,
    *,
    num_layers: int | None = None,
    tokenizer_dir: Path | None = None,
    chat_template: str | None = None,
) -> Path:
    """Publish `root/step_N`: safetensors, the config and tokenizer of `model_dir`, and `manifest.json`.

    `num_layers` is written into the config when layers were cut; `tokenizer_dir` and `chat_template` replace what
    `model_dir` has. The result is what `AutoModelForCausalLM.from_pretrained` and engines read.
    """

    def write(directory: Path) -> None:
        from safetensors.torch import save_file

        held = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        save_file(held, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in held.values()}
        config = adapt_config(json.loads((model_dir / "config.json").read_text(encoding="utf-8")), dtypes, num_layers)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _copy(model_dir, directory, CONFIG_FILES)
        _copy(tokenizer_dir or model_dir, directory, TOKENIZER_FILES)
        if chat_template is not None:
            (directory / TEMPLATE_FILE).write_text(chat_template, encoding="utf-8")
        manifest = Manifest(SCHEMA, step, describe_tensors(held))
        (directory / MANIFEST_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))

    return publish_step(Path(root), step, write)


def _copy(source: Path, directory: Path, patterns: tuple[str, ...]) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in patterns):
            shutil.copyfile(path, directory / path.name)


def adapt_config(config: dict[str, Any], dtypes: set[str], num_layers: int | None) -> dict[str, Any]:
    """A `config.json` that tells the truth about published tensors: their dtype and the number of layers."""
    adapted = {key: value for key, value in config.items() if key != "dtype"}
    if len(dtypes) == 1:
        adapted["torch_dtype"] = next(iter(dtypes))
    if num_layers is not None:
        adapted["num_hidden_layers"] = num_layers
        if isinstance(adapted.get("layer_types"), list):
            adapted["layer_types"] = adapted["layer_types"][:num_layers]
    return adapted


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a published directory; `ValueError` when it is missing, malformed or of another edition."""
    path = Path(directory) / MANIFEST_FILE
    if not path.is_file():
        raise ValueError(f"{directory} has no {MANIFEST_FILE}: it was not published by a trainer")
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path} is no manifest: {error}") from error
    if manifest.schema != SCHEMA:
        raise ValueError(f"{path} has schema {manifest.schema}, this version reads schema {SCHEMA}")
    return manifest


def verify_tensors(tensors: Mapping[str, Tensor], manifest: Manifest) -> dict[str, str]:
    """The digest of each tensor, after checking that they are exactly those of the manifest.

    Raises `ValueError` naming the first tensors that are missing, unexpected or different.
    """
    found = describe_tensors(tensors)
    wrong = sorted(
        name for name in found.keys() | manifest.tensors.keys() if found.get(name) != manifest.tensors.get(name)
    )
    if wrong:
        shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise ValueError(f"weights of step {manifest.step} do not match their manifest: {shown}")
    return {name: entry.digest for name, entry in found.items()}


def prune_weights(
    root: Path, latest: int, max_async_level: int, ckpt_interval: int | None, final: int | None
) -> list[int]:
    """Remove versions nobody needs any more; returns them.

    Kept are the last `max_async_level + 2` up to `latest` (engines may still be on their way to one of them), every
    `ckpt_interval`-th (a resumed run starts engines from it), the `final` step, and whatever is newer than `latest`.
    """
    oldest = latest - max_async_level - 1
    steps = complete_steps(root)
    return prune_steps(
        root, [s for s in steps if s >= oldest or s == final or (ckpt_interval is not None and s % ckpt_interval == 0)]
    )
