"""The wire from trainer to engines: a plain Hugging Face or PEFT directory per version, with a manifest of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from prime_rl.transport.canary import Canary, write_canary
from rollouts.training.steps import prune_steps, publish_step

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 1
MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "model.safetensors"
ADAPTER_WEIGHTS_FILE, ADAPTER_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
PEFT_PREFIX = "base_model.model."
"""What PEFT writes before the names of the model's matrices."""
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
    tie_word_embeddings: bool | None = None,
    tokenizer_dir: Path | None = None,
    chat_template: str | None = None,
    adapter_config: Mapping[str, Any] | None = None,
    canary: Canary | None = None,
) -> Path:
    """Publish `root/step_N`: safetensors, the config and tokenizer of `model_dir`, and `manifest.json`.

    `num_layers` is written into the config when layers were cut, `tie_word_embeddings` when it is given;
    `tokenizer_dir` and `chat_template` replace what `model_dir` has. The result is what
    `AutoModelForCausalLM.from_pretrained` and engines read. With `adapter_config` the tensors are a PEFT adapter's by
    PEFT's names, and the result is what `peft` and engines read beside the base model. `canary` goes along.
    """

    def write(directory: Path) -> None:
        from safetensors.torch import save_file

        held = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        file = WEIGHTS_FILE if adapter_config is None else ADAPTER_WEIGHTS_FILE
        save_file(held, directory / file, metadata={"format": "pt"})
        if adapter_config is not None:
            _write_json(directory / ADAPTER_CONFIG_FILE, adapter_config)
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in held.values()}
        config = adapt_config(json.loads((model_dir / "config.json").read_text(encoding="utf-8")), dtypes, num_layers)
        if tie_word_embeddings is not None:
            config["tie_word_embeddings"] = tie_word_embeddings
        _write_json(directory / "config.json", config)
        _copy(model_dir, directory, CONFIG_FILES)
        _copy(tokenizer_dir or model_dir, directory, TOKENIZER_FILES)
        if chat_template is not None:
            (directory / TEMPLATE_FILE).write_text(chat_template, encoding="utf-8")
        if canary is not None:
            write_canary(directory, canary)
        write_manifest(directory, build_manifest(step, held))

    return publish_step(Path(root), step, write)


def is_adapter(directory: Path) -> bool:
    """Whether a published directory holds an adapter instead of a whole model."""
    return (Path(directory) / ADAPTER_CONFIG_FILE).is_file()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(value), indent=2) + "\n", encoding="utf-8")


def build_manifest(step: int, tensors: Mapping[str, Tensor]) -> Manifest:
    """What version `step` is, tensor by tensor."""
    return Manifest(SCHEMA, step, describe_tensors(tensors))


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write it into a directory that is being published."""
    (directory / MANIFEST_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))


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
    return _verify(describe_tensors(tensors), manifest)


def _verify(found: Mapping[str, TensorEntry], manifest: Manifest) -> dict[str, str]:
    wrong = sorted(
        name for name in found.keys() | manifest.tensors.keys() if found.get(name) != manifest.tensors.get(name)
    )
    if wrong:
        shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise ValueError(f"weights of step {manifest.step} do not match their manifest: {shown}")
    return {name: entry.digest for name, entry in found.items()}


def check_directory(directory: Path) -> tuple[int, dict[str, str]]:
    """Step and digests of a published directory, whose files were read tensor by tensor and agree with its manifest.

    Raises `ValueError` as `verify_tensors` does, or when a file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    manifest = read_manifest(directory)
    found: dict[str, TensorEntry] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - a handle is no mapping
                    found |= describe_tensors({name: handle.get_tensor(name)})
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
    return manifest.step, _verify(found, manifest)


def prune_weights(
    root: Path, latest: int, max_async_level: int, ckpt_interval: int | None, final: int | None
) -> list[int]:
    """Remove versions nobody needs any more; returns them.

    Kept are the last `max_async_level + 2` up to `latest` (engines may still be on their way to one of them), every
    `ckpt_interval`-th (a resumed run starts engines from it), the `final` step, and whatever is newer than `latest`.
    """
    oldest = latest - max_async_level - 1
    return prune_steps(
        root, lambda s: s >= oldest or s == final or (ckpt_interval is not None and s % ckpt_interval == 0)
    )
