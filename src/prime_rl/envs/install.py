"""Installation of missing environments from a package index, if the config enables it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from rollouts.training.environments.resolve import NAME, find_environment

TIMEOUT_S = 900


def ensure_installed(env_id: str, index_url: str) -> None:
    """Install the package of a missing environment; raises `ValueError` on failure.

    The package itself comes only from `index_url`, which prevents dependency confusion; its dependencies come from
    pip's default index. They are installed before it, so that an environment that is found is complete.
    """
    try:
        find_environment(env_id)
        return
    except ValueError as error:
        match = NAME.fullmatch(env_id)
        if match is None:
            raise
        if "{org}" in index_url and not match["org"]:
            raise ValueError(f"{error}: write env.id as org/name, or set env.index_url") from error
    name = match["name"].replace("_", "-")
    url = index_url.replace("{org}", match["org"] or "")
    requirement = name if match["version"] in (None, "latest") else f"{name}=={match['version']}"
    package = ("--no-deps", "--index-url", url, requirement)
    try:
        requirements = _find_requirements(env_id, package)
    except ValueError as error:
        if not is_reachable(url):
            raise ValueError(
                f"environment {env_id!r} was not installed: its index {url} cannot be reached: check the network "
                "connection and env.index_url"
            ) from error
        raise
    if requirements:
        _pip(env_id, *requirements)
    _pip(env_id, *package)
    importlib.invalidate_caches()


def _find_requirements(env_id: str, package: tuple[str, ...]) -> list[str]:
    """Dependencies of a package, which is installed in a temporary folder for that."""
    with tempfile.TemporaryDirectory() as folder:
        _pip(env_id, "--target", folder, *package)
        found = [text for info in importlib.metadata.distributions(path=[folder]) for text in info.requires or []]
    return [text for text in found if "extra ==" not in text]


def is_reachable(url: str) -> bool:
    """Whether the host of an HTTP address accepts connections; True for files, and where a proxy is configured."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.scheme in urllib.request.getproxies():
        return True
    try:
        with socket.create_connection((parts.hostname, parts.port or (80 if parts.scheme == "http" else 443)), 10):
            return True
    except OSError:
        return False


def install_folder(folder: Path) -> None:
    """Install the package in `folder` in editable mode with dependencies; raises `ValueError` on failure."""
    _pip(folder.name, "--editable", str(folder))


def _pip(env_id: str, *arguments: str) -> None:
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "pip", "install", "--quiet", "--python", sys.executable]
    else:
        raise ValueError(f"environment {env_id!r} cannot be installed: there is neither pip nor uv; install pip")
    try:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError(
            f"environment {env_id!r}: installing {arguments[-1]} took longer than {TIMEOUT_S} s"
        ) from None
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line] or ["no reason given"]
        reason = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])
        raise ValueError(f"environment {env_id!r} was not installed: {reason.strip()}: check env.id and env.index_url")
