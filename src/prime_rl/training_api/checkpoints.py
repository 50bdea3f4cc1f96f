"""Checkpoints on disk: `<root>/<model>/<kind>/<name>/`, addressed by clients as `tinker://<model id>/<kind>/<name>`.

A checkpoint is a PEFT directory with `checkpoint.json`; a training checkpoint also has the optimizer's moments. It is
published by renaming, so that a killed server leaves none half written.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson
from loguru import logger
from safetensors.torch import load_file

from prime_rl.trainer.lora import load_adapter
from prime_rl.training_api.adapters import AdapterConfig, TrainedAdapter
from prime_rl.transport.weights import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, PEFT_PREFIX
from rollouts.training.json_files import read_json_file
from rollouts.training.manifests import build_manifest, write_manifest
from rollouts.training.steps import publish_dir
from rollouts.training.tensor_files import save_tensors

KINDS = {"weights": "training", "sampler_weights": "sampler"}
"""Segment of the path -> checkpoint type."""

INFO_FILE, OPTIMIZER_FILE = "checkpoint.json", "optimizer.safetensors"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
MIN_TTL_S, MAX_TTL_S = 3600, 10 * 366 * 86400


class NotFound(ValueError):
    """An id or path that does not exist, or belongs to another key."""


@dataclass(frozen=True)
class AdapterCheckpoint:
    """Contents of `checkpoint.json`; times in Unix seconds."""

    model_id: str
    kind: str
    name: str
    owner: str
    base_model: str
    config: dict[str, Any]
    num_steps: int
    created: float
    expires: float | None = None
    public: bool = False
    ephemeral: bool = False
    """Deleted with its session, and not listed."""
    size_bytes: int = 0
    user_metadata: dict[str, str] | None = None
    request_id: str | None = None
    """The request that saved it."""
    base_digest: str | None = None
    """Identifies the weights of the base model; None: saved by an older version."""

    @property
    def path(self) -> str:
        """The client's path."""
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    def describe(self) -> dict[str, Any]:
        """The checkpoint in the client's words."""
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": KINDS[self.kind],
            "time": _format_time(self.created),
            "tinker_path": self.path,
            "size_bytes": self.size_bytes,
            "public": self.public,
            "user_metadata": self.user_metadata,
            "expires_at": None if self.expires is None else _format_time(self.expires),
        }


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def find_expiry(ttl_seconds: Any) -> float | None:
    """Unix time after `ttl_seconds`; `ValueError` outside of one hour to ten years."""
    if ttl_seconds is None:
        return None
    if not isinstance(ttl_seconds, int) or not MIN_TTL_S <= ttl_seconds <= MAX_TTL_S:
        raise ValueError(f"ttl_seconds must be from {MIN_TTL_S} to {MAX_TTL_S}, got {ttl_seconds!r}")
    return time.time() + ttl_seconds


def split_path(path: str) -> tuple[str, str, str]:
    """Model id, kind and name of a client's path; `ValueError` for anything else, such as a path out of the store."""
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in KINDS:
        raise ValueError(f"{path!r} is not tinker://MODEL_ID/weights/NAME or tinker://MODEL_ID/sampler_weights/NAME")
    check_name(parts[2])
    return parts[0], parts[1], parts[2]


def check_name(name: Any) -> str:
    """A checkpoint name; `ValueError` for one that is not a plain file name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"checkpoint name {name!r}: use letters, digits, '_', '-' and '.', at most 128 characters")
    return name


class AdapterStore:
    """All checkpoints below a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._damaged: set[Path] = set()
        root.mkdir(parents=True, exist_ok=True)
        for unfinished in root.glob("*/*/.tmp-*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def directory(self, model_id: str, kind: str, name: str) -> Path:
        """Directory of a checkpoint; `NotFound` for a model id that is no file name."""
        folder = model_id.replace(":", "_")
        if not _NAME.fullmatch(folder):
            raise NotFound(f"no model {model_id!r}")
        return self.root / folder / kind / name

    def save(
        self, adapter: TrainedAdapter, info: AdapterCheckpoint, base_name: str, *, overwrite: bool = False
    ) -> AdapterCheckpoint:
        """Write and publish; `ValueError` if the checkpoint exists, unless `overwrite`.

        A request that is executed again after a restart finds its own checkpoint, which stays.
        """
        final = self.directory(info.model_id, info.kind, info.name)
        saved = self._find_info(final / INFO_FILE)
        if saved is not None and saved.request_id == info.request_id:
            return saved
        if final.exists() and not overwrite:
            cure = ", or overwrite=True" if info.kind == "weights" else ""  # the client has it for these only
            raise ValueError(f"{info.path} exists: choose another name{cure}")
        tensors = {PEFT_PREFIX + name: tensor.contiguous() for name, tensor in adapter.adapter.tensors.items()}
        moments = adapter.optimizer_tensors() if info.kind == "weights" else {}
        size = sum(t.numel() * t.element_size() for t in (*tensors.values(), *moments.values()))
        info = replace(info, config=asdict(adapter.config), num_steps=adapter.num_steps, size_bytes=size)
        spec = adapter.config.spec
        peft = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_name,
            "r": spec.rank,
            "lora_alpha": spec.alpha,
            "target_modules": sorted({name.split(".")[-3] for name in tensors}),
            "bias": "none",
            "inference_mode": True,
        }

        def write(directory: Path) -> None:
            save_tensors(tensors, directory / ADAPTER_WEIGHTS_FILE)
            (directory / ADAPTER_CONFIG_FILE).write_bytes(orjson.dumps(peft, option=orjson.OPT_INDENT_2))
            write_manifest(directory, build_manifest(adapter.num_steps, tensors))  # inference servers verify digests
            if info.kind == "weights":
                save_tensors({k: v.detach().contiguous() for k, v in moments.items()}, directory / OPTIMIZER_FILE)
            _write_info(directory, info)

        final.parent.mkdir(parents=True, exist_ok=True)
        publish_dir(final, write)
        return info

    def find(self, path: str, owner: str) -> AdapterCheckpoint:
        """A checkpoint that `owner` may read; `NotFound` otherwise."""
        model_id, kind, name = split_path(path)
        info = self._find_info(self.directory(model_id, kind, name) / INFO_FILE)
        if info is None or info.model_id != model_id or not (info.public or info.owner == owner):
            raise NotFound(f"there is no checkpoint {path} for this API key")
        return info

    def locate(self, info: AdapterCheckpoint) -> Path:
        """Directory of a checkpoint; `NotFound` for one that was deleted."""
        directory = self.directory(info.model_id, info.kind, info.name)
        if not directory.is_dir():
            raise NotFound(f"{info.path} was deleted")
        return directory

    def read(self, info: AdapterCheckpoint) -> tuple[AdapterConfig, dict[str, Any], dict[str, Any]]:
        """Adapter configuration, tensors and moments; `NotFound` for a checkpoint that was deleted."""
        directory = self.locate(info)
        adapter = load_adapter(directory)
        moments = load_file(directory / OPTIMIZER_FILE) if (directory / OPTIMIZER_FILE).is_file() else {}
        return AdapterConfig(**info.config), adapter.tensors, moments

    def find_all(self, owner: str, model_id: str | None = None) -> list[AdapterCheckpoint]:
        """Checkpoints of `owner`, oldest first."""
        mine = [info for info in self._all() if info.owner == owner and not info.ephemeral]
        found = [info for info in mine if model_id in (None, info.model_id)]
        return sorted(found, key=lambda info: info.created)

    def change(self, info: AdapterCheckpoint, **fields: Any) -> None:
        """Replace fields of `checkpoint.json`."""
        _write_info(self.directory(info.model_id, info.kind, info.name), replace(info, **fields))

    def delete(self, info: AdapterCheckpoint) -> None:
        """Delete a checkpoint, if it exists; it disappears at once."""
        directory = self.directory(info.model_id, info.kind, info.name)
        if not directory.exists():
            return
        gone = directory.with_name(f".tmp-deleted-{directory.name}-{time.time_ns()}")
        directory.rename(gone)
        shutil.rmtree(gone)

    def find_expired(self) -> list[AdapterCheckpoint]:
        """Checkpoints past their time."""
        return [info for info in self._all() if info.expires is not None and info.expires < time.time()]

    def delete_ephemeral(self, kept: Collection[str]) -> None:
        """Delete unnamed weights whose path is not in `kept`."""
        for info in [info for info in self._all() if info.ephemeral and info.path not in kept]:
            self.delete(info)

    def _all(self) -> Iterator[AdapterCheckpoint]:
        for kind in KINDS:
            for file in self.root.glob(f"*/{kind}/*/{INFO_FILE}"):
                if not file.parent.name.startswith(".") and (info := self._find_info(file)) is not None:
                    yield info

    def _find_info(self, file: Path) -> AdapterCheckpoint | None:
        """None for a checkpoint that is not there, or no longer, and for a damaged one, which is logged once."""
        try:
            return AdapterCheckpoint(**read_json_file(file))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            if file not in self._damaged:
                logger.warning(f"Skipping a damaged checkpoint, {file}: {error}")
            self._damaged.add(file)
            return None


def _write_info(directory: Path, info: AdapterCheckpoint) -> None:
    unfinished = directory / f"{INFO_FILE}.tmp"
    with unfinished.open("wb") as file:
        file.write(orjson.dumps(asdict(info), option=orjson.OPT_INDENT_2))
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(directory / INFO_FILE)
