"""Directories of weights: which a server may be told to load, and whether one holds what its publisher says."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from prime_rl.inference.config import InferenceConfig
from prime_rl.transport.weights import MANIFEST_FILE, check_directory
from prime_rl.utils.tokenizer import resolve_model_dir
from rollouts.training.steps import is_complete, parse_step, step_path

SHOWN_PATH = 200


def resolve_allowed(weight_dir: str, allowed: list[Path]) -> Path:
    """The real path of `weight_dir` if it lies below one of `allowed`, symbolic links and `..` resolved.

    Raises `PermissionError` otherwise, whether or not the directory exists.
    """
    shown = weight_dir if len(weight_dir) <= SHOWN_PATH else f"{weight_dir[:SHOWN_PATH]}..."
    try:
        path = Path(weight_dir).resolve()
    except (ValueError, OSError, RuntimeError) as error:  # a zero byte, a name too long, links in a circle
        raise PermissionError(f"{shown!r} is no path: {error}") from error
    if not any(path.is_relative_to(root.resolve()) for root in allowed):
        raise PermissionError(
            f"{shown} is not below inference.output_dir or inference.weight_dirs: add its parent to weight_dirs"
        )
    return path


def check_step(directory: Path) -> tuple[int, dict[str, str] | None]:
    """Version and digests of a published directory, every tensor read and checked before the engine hears of it."""
    if not directory.is_dir():
        raise ValueError(f"{directory} does not exist")
    if not is_complete(directory):
        raise ValueError(f"{directory} is not complete: it has no STABLE marker")
    if not any(directory.glob("model*.safetensors")):
        raise ValueError(f"{directory} holds no model.safetensors")
    if (directory / MANIFEST_FILE).is_file():
        return check_directory(directory)
    step = parse_step(directory.name)
    if step is None:
        raise ValueError(f"{directory} has no version: name it step_N or give it a {MANIFEST_FILE}")
    return step, None


def prepare_model_dir(config: InferenceConfig) -> Path:
    """The directory that a server of others loads; random or shortened weights are written out first, the trainer's."""
    model_dir = resolve_model_dir(config.model.name)
    debug = config.model.debug
    if not debug.random_init and debug.num_layers is None:
        return model_dir
    from prime_rl.inference.embedded.loading import WeightReader
    from prime_rl.transport.weights import publish_weights

    tensors, version = WeightReader(config, model_dir).read_base()
    root = Path(tempfile.mkdtemp(prefix="prime-rl-")) if config.output_dir is None else config.output_dir / "initial"
    shutil.rmtree(step_path(root, version), ignore_errors=True)
    return publish_weights(root, version, tensors, model_dir, num_layers=debug.num_layers).resolve()
