"""Weight directories: path allow-list, and verification against the publisher's manifest."""

from __future__ import annotations

from pathlib import Path

from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.request_parsing import ApiError, Json
from prime_rl.transport.weights import check_directory
from rollouts.training.steps import is_complete

SHOWN_PATH = 200


def parse_directory(body: Json, key: str, config: InferenceConfig) -> Path:
    """The directory named in a request; HTTP 403 unless it is allowed."""
    given = body.get(key)
    if not isinstance(given, str) or not given:
        raise ApiError(f'give {{"{key}": "<directory>"}}', param=key)
    try:
        return resolve_allowed(given, allowed_dirs(config))
    except PermissionError as error:
        raise ApiError(str(error), status=403, param=key, kind="permission_error") from error


def allowed_dirs(config: InferenceConfig) -> list[Path]:
    """Directories below which weights may be loaded."""
    return [*config.weight_dirs, *filter(None, [config.output_dir])]


def resolve_allowed(weight_dir: str, allowed: list[Path]) -> Path:
    """Resolve `weight_dir`; it and its files must lie below `allowed` after resolving symbolic links and `..`.

    Links between allowed directories are fine. Otherwise `PermissionError`, whether or not the directory exists.
    """
    shown = weight_dir if len(weight_dir) <= SHOWN_PATH else f"{weight_dir[:SHOWN_PATH]}..."
    try:
        path = Path(weight_dir).resolve()
    except (ValueError, OSError, RuntimeError) as error:  # null byte, name too long, symlink loop
        raise PermissionError(f"{shown!r} is not a valid path: {error}") from error
    roots = [root.resolve() for root in allowed]
    if not _is_below(path, roots):
        raise PermissionError(
            f"{shown} is not below inference.output_dir or inference.weight_dirs: add its parent to weight_dirs"
        )
    for entry in path.iterdir() if path.is_dir() else ():
        if entry.is_symlink() and not _is_below(entry, roots):
            raise PermissionError(
                f"{entry.name} of {shown} is a link out of inference.output_dir and inference.weight_dirs: "
                "replace it with the file, or add its target directory to weight_dirs"
            )
    return path


def _is_below(path: Path, roots: list[Path]) -> bool:
    try:
        target = path.resolve()
    except (OSError, RuntimeError):  # symlink loop
        return False
    return any(target.is_relative_to(root) for root in roots)


def check_step(directory: Path) -> tuple[int, dict[str, str]]:
    """Verify a published directory against its manifest before an engine loads it; returns version and digests.

    `ValueError` if it is incomplete, corrupt, or has no manifest.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} does not exist")
    if not is_complete(directory):
        raise ValueError(f"{directory} is incomplete: it has no STABLE marker")
    if not any(directory.glob("model*.safetensors")):
        raise ValueError(f"{directory} has no model.safetensors")
    return check_directory(directory)
