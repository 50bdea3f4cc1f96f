"""Checkpoints by source, tag and step: flat files of published models, and `step_N` directories."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat.common import get_base_dir, resolve_device
from nanochat.gpt import GPT, GPTConfig
from nanochat.tokenizer import NanochatTokenizer, get_tokenizer
from rollouts.training.backends.checkpoint import read_tensors
from rollouts.training.json_files import read_json_file
from rollouts.training.steps import complete_steps, parse_step, publish_step, step_path

SOURCES = {
    "base": "base_checkpoints",
    "mid": "mid_checkpoints",
    "sft": "chatsft_checkpoints",
    "rl": "chatrl_checkpoints",
    "prime_rl": "prime_rl_checkpoints",
}
MODEL_FILE, METADATA_FILE, OPTIMIZER_FILE, STATE_FILE = "model.pt", "metadata.json", "optimizer.bin", "state.json"
DIGEST_KEY = "tokenizer_sha256"
"""Metadata: the digest of the tokenizer that the model was trained with."""
CURES = {
    **dict.fromkeys(SOURCES, "copy one there, or choose another source"),
    "sft": "make a small one with `python -m scripts.tiny_bootstrap`",
    "prime_rl": "runs of scripts.prime_rl_train write them, start one without --resume",
}
"""What to do about a missing checkpoint, by source."""


@dataclass(frozen=True)
class CheckpointLocation:
    """Location of a checkpoint: a directory `step_N`, or the flat files `model_00000N.pt` and `meta_00000N.json`."""

    model_path: Path
    meta_path: Path
    step: int

    @property
    def directory(self) -> Path:
        return self.model_path.parent


def load_model(
    source: str,
    device: torch.device | str = "auto",
    phase: str = "eval",
    model_tag: str | None = None,
    step: int | None = None,
) -> tuple[GPT, NanochatTokenizer, dict[str, Any]]:
    """Model, tokenizer and metadata of a checkpoint of `source`: base, mid, sft, rl or prime_rl.

    `model_tag` defaults to the deepest `d<N>`, `step` to the last; `phase` "train" or "eval" sets the model's mode.
    `ValueError` when there is no such checkpoint, with what there is, and when the tokenizer is another one.
    """
    if phase not in ("train", "eval"):
        raise ValueError(f"phase {phase!r} is neither train nor eval")
    place = find_checkpoint(source, model_tag, step)
    model, meta = read_model(place, resolve_device(device))
    tokenizer = get_tokenizer()
    check_tokenizer(meta, tokenizer, place.model_path)
    model.train(phase == "train")
    return model, tokenizer, meta


def check_tokenizer(meta: Mapping[str, Any], tokenizer: NanochatTokenizer, path: Path) -> None:
    """Raise `ValueError` if the model of `path` was trained with another tokenizer, as far as its metadata tells."""
    num_tokens = meta["model_config"]["vocab_size"]
    if tokenizer.get_vocab_size() != num_tokens:
        problem = f"has {num_tokens} tokens and the tokenizer of {get_base_dir()} {tokenizer.get_vocab_size()}"
    elif meta.get(DIGEST_KEY, tokenizer.digest) != tokenizer.digest:
        problem = f"was trained with another tokenizer than that of {get_base_dir()}"
    else:
        return
    raise ValueError(f"{path} {problem}: copy the tokenizer it was trained with to {get_base_dir() / 'tokenizer'}")


def find_checkpoint(source: str, model_tag: str | None = None, step: int | None = None) -> CheckpointLocation:
    """Location of the checkpoint; `ValueError` lists the existing ones."""
    if source not in SOURCES:
        raise ValueError(f"source {source!r} is not one of {', '.join(SOURCES)}")
    root = get_base_dir() / SOURCES[source]
    tag = model_tag or _deepest_tag(root)
    if tag is None:
        raise ValueError(f"there is no {source} checkpoint in {root}: {CURES[source]}")
    places = list_checkpoints(root / tag)
    if not places:
        tags = ", ".join(_tags(root)) or "none"
        raise ValueError(f"there is no {source} checkpoint {tag!r} in {root} (there: {tags}): {CURES[source]}")
    if step is not None and step not in places:
        raise ValueError(f"{root / tag} has no step {step}; it has {', '.join(map(str, sorted(places)))}")
    return places[max(places) if step is None else step]


def list_checkpoints(directory: Path) -> dict[int, CheckpointLocation]:
    """Complete checkpoints of a tag by step, of both layouts."""
    places = {}
    for path in directory.glob("model_*.pt"):
        match = re.fullmatch(r"model_(\d+)\.pt", path.name)
        meta = path.with_name(f"meta_{match[1]}.json") if match else path
        if match and meta.is_file():
            places[int(match[1])] = CheckpointLocation(path, meta, int(match[1]))
    for step in complete_steps(directory):
        folder = step_path(directory, step)
        places[step] = CheckpointLocation(folder / MODEL_FILE, folder / METADATA_FILE, step)
    # `step_N` directories are complete with both documented files, without a marker.
    for folder in directory.glob("step_*"):
        number = parse_step(folder.name)
        if number is not None and (folder / METADATA_FILE).is_file() and (folder / MODEL_FILE).is_file():
            places.setdefault(number, CheckpointLocation(folder / MODEL_FILE, folder / METADATA_FILE, number))
    return places


def read_model(place: CheckpointLocation, device: torch.device) -> tuple[GPT, dict[str, Any]]:
    """The model of a checkpoint in float32 on `device`, and its metadata; `ValueError` if they do not match."""
    meta = read_json_file(place.meta_path)
    if "model_config" not in meta:
        raise ValueError(f"{place.meta_path} has no model_config: it belongs to no nanochat model")
    model = GPT(GPTConfig.from_meta(meta["model_config"]))
    load_state(model, read_tensors(place.model_path), str(place.model_path))
    return model.to(device), {**meta, "step": meta.get("step", place.step)}


@torch.no_grad()
def load_state(model: GPT, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy a state dict into the model with a cast; prefixes of `torch.compile` are removed."""
    given = {name.removeprefix("_orig_mod."): tensor for name, tensor in tensors.items()}
    held = dict(model.named_parameters())
    for name in sorted(given.keys() ^ held.keys()):
        raise ValueError(f"{source} {'lacks' if name in held else 'has'} {name}: it is of another architecture")
    for name, parameter in held.items():
        if parameter.shape != given[name].shape:
            shapes = f"{list(given[name].shape)}, model_config has {list(parameter.shape)}"
            raise ValueError(f"{name} of {source} has shape {shapes}")
        parameter.copy_(given[name])


def save_checkpoint(
    source: str, model_tag: str, step: int, model: GPT, metadata: Mapping[str, Any], *, flat: bool = False
) -> Path:
    """Write model and metadata atomically as `step_N/` or as `flat` files; returns the path."""
    root = get_base_dir() / SOURCES[source] / model_tag
    meta = {"step": step, "model_config": model.config.to_meta(), **metadata}
    if not flat:
        return publish_step(root, step, lambda directory: write_model(directory, model, meta))
    root.mkdir(parents=True, exist_ok=True)
    path = root / f"model_{step:06d}.pt"
    _write_aside(path, lambda aside: torch.save(model.state_dict(), aside))
    text = json.dumps(meta, indent=2)
    _write_aside(root / f"meta_{step:06d}.json", lambda aside: aside.write_text(text, encoding="utf-8"))
    return path


def write_model(directory: Path, model: GPT, metadata: Mapping[str, Any]) -> None:
    """The two documented files."""
    torch.save({name: tensor.cpu() for name, tensor in model.state_dict().items()}, directory / MODEL_FILE)
    text = json.dumps(dict(metadata), indent=2, allow_nan=False)
    (directory / METADATA_FILE).write_text(text, encoding="utf-8")


def write_progress(directory: Path, optimizer: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write the remaining state for an exact resume: optimizer moments and JSON values."""
    torch.save(dict(optimizer), directory / OPTIMIZER_FILE)
    (directory / STATE_FILE).write_text(json.dumps(dict(state), allow_nan=False), encoding="utf-8")


def read_progress(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inverse of `write_progress`; `ValueError` if the checkpoint cannot be resumed."""
    if not (directory / STATE_FILE).is_file() or not (directory / OPTIMIZER_FILE).is_file():
        raise ValueError(
            f"{directory} holds a model and no progress: without --resume, use it as --source=rl from {SOURCES['rl']}"
        )
    state = read_json_file(directory / STATE_FILE)
    return read_tensors(directory / OPTIMIZER_FILE), state


def _write_aside(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically."""
    aside = path.with_name(f".tmp-{path.name}")
    write(aside)
    with aside.open("rb") as written:
        os.fsync(written.fileno())
    os.replace(aside, path)


def _tags(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("*") if path.is_dir() and list_checkpoints(path))


def list_models() -> list[tuple[str, Path]]:
    """Source and directory of every tag with a checkpoint."""
    roots = {source: get_base_dir() / name for source, name in SOURCES.items()}
    return [(source, root / tag) for source, root in roots.items() for tag in _tags(root)]


def _deepest_tag(root: Path) -> str | None:
    """The largest d<N>, else the newest directory."""
    tags = _tags(root)
    deep = [tag for tag in tags if re.fullmatch(r"d\d+", tag)]
    if deep:
        return max(deep, key=lambda tag: int(tag[1:]))
    return max(tags, key=lambda tag: (root / tag).stat().st_mtime, default=None)


def prime_rl_dir(model_tag: str) -> Path:
    """Directory of the `step_N` checkpoints of an RL run."""
    return get_base_dir() / SOURCES["prime_rl"] / model_tag
