"""`push`: upload published weights to the Hugging Face hub, with a model card."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NoReturn

from prime_rl.configuration.arguments import CommandParser
from prime_rl.configuration.render import uncomment
from prime_rl.pretrained.cache import models_cache_dir
from prime_rl.pretrained.fetch import KNOWN_MODELS
from prime_rl.runtime.run_dir import RunDir
from prime_rl.runtime.tokenizer import ASSETS_DIR
from prime_rl.transport.weights import ADAPTER_CONFIG_FILE, FURTHER_TEMPLATES, is_adapter
from rollouts.training.json_files import read_json_file
from rollouts.training.steps import is_complete, latest_step, parse_step, step_path

CARD = "README.md"
INTERNAL = ("STABLE", "canary.json", "manifest.json", ".*")
"""Files of the exchange between trainer and engines, which are not uploaded."""


def write_card(directory: Path, repo_id: str) -> str:
    """The model card of a directory of weights: metadata, how it was trained, and how to load it."""
    from huggingface_hub import ModelCardData

    adapter = read_json_file(directory / ADAPTER_CONFIG_FILE) if is_adapter(directory) else None
    run, step = RunDir(directory.resolve().parent.parent), parse_step(directory.name)
    methods = {"trainer": "reinforcement learning", "sft": "supervised fine-tuning"}
    process = next((name for name in methods if run.config(name).is_file()), None)
    base = find_hub_id(adapter["base_model_name_or_path"] if adapter else _read_base(run, process))
    library, loader = ("peft", "AutoPeftModelForCausalLM") if adapter else ("transformers", "AutoModelForCausalLM")
    data = ModelCardData(base_model=base, library_name=library, pipeline_tag="text-generation", tags=["prime-rl"])
    of = f" of [{base}](https://huggingface.co/{base})" if base else ""
    by = f" by {methods[process]}" if process else ""
    at = "" if step is None else f", step {step}"
    return (
        f"---\n{data.to_yaml()}\n---\n\n# {repo_id.rpartition('/')[2]}\n\n"
        f"{'A LoRA adapter' if adapter else 'A model'}{of}, trained{by} with prime-rl{at}.\n\n"
        f'```python\nfrom {library} import {loader}\n\nmodel = {loader}.from_pretrained("{repo_id}")\n```\n'
    )


def _read_base(run: RunDir, process: str | None) -> str | None:
    """`model.name` of a resolved trainer configuration."""
    import tomllib

    if process is None:
        return None
    text = uncomment(run.config(process).read_text(encoding="utf-8"))
    name = tomllib.loads(text).get("model", {}).get("name")
    return name if isinstance(name, str) else None


def find_hub_id(base: str | None) -> str | None:
    """The hub id of a base model; None for a directory of this machine, or a shipped model."""
    if base is None:
        return None
    name = Path(base).name if Path(base).parent == models_cache_dir() else base
    if name in KNOWN_MODELS:
        return KNOWN_MODELS[name].hub_id
    is_local = Path(base).expanduser().exists() or (ASSETS_DIR / base).is_dir() or base.startswith(("/", "~", "."))
    return None if is_local or base.count("/") > 1 else base


def rewrite_adapter_config(directory: Path) -> bytes:
    """`adapter_config.json` with the hub id of its base model; `ValueError` for a base that is not on the hub."""
    config = read_json_file(directory / ADAPTER_CONFIG_FILE)
    base = config.get("base_model_name_or_path")
    hub_id = find_hub_id(base)
    if hub_id is None:
        raise ValueError(
            f"the base model of {directory} is {base}, which is not on the hub, so others could not load the adapter: "
            f"merge it with `convert {shlex.quote(str(directory))} MERGED` and push that"
        )
    return json.dumps({**config, "base_model_name_or_path": hub_id}, indent=2).encode()


def check_weights(directory: Path) -> None:
    """`ValueError` unless a directory contains complete weights that others can load."""
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory: give one with weights, such as outputs/rl/weights/step_20")
    if (newest := latest_step(directory)) is not None:
        raise ValueError(f"{directory} has several versions: give one of them, such as {step_path(directory, newest)}")
    if not any(directory.glob("*.safetensors")):
        raise ValueError(f"{directory} has no *.safetensors: give a directory of weights")
    if parse_step(directory.name) is not None and not is_complete(directory):
        raise ValueError(f"{directory} is incomplete: it has no STABLE marker")
    if is_adapter(directory):
        rewrite_adapter_config(directory)


def list_files(directory: Path) -> list[str]:
    """The files to upload, as sorted paths below the directory."""
    paths = [path for path in (*directory.iterdir(), *directory.glob(FURTHER_TEMPLATES)) if path.is_file()]
    names = sorted(path.relative_to(directory).as_posix() for path in paths)
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in INTERNAL)]


def push(directory: Path, repo_id: str, *, private: bool, token: str, message: str) -> str:
    """Create the repository if it is missing, upload the directory in one commit and return its address.

    A card in the directory or on the hub is kept. `ValueError` if the hub refuses.
    """
    import httpx
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    check_weights(directory)
    api = HfApi(token=token)
    try:
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        files: dict[str, Path | bytes] = {name: directory / name for name in list_files(directory)}
        if is_adapter(directory):
            files[ADAPTER_CONFIG_FILE] = rewrite_adapter_config(directory)
        if CARD not in files and not api.file_exists(repo_id, CARD):
            files[CARD] = write_card(directory, repo_id).encode()
        operations = [CommitOperationAdd(name, content) for name, content in files.items()]
        api.create_commit(repo_id, operations, commit_message=message)
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).replace(token, "***")
        raise ValueError(f"the upload to {repo_id} failed: {reason}") from error
    return str(url)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Console script `push`: exit code 0, or 2 for invalid input or an unreachable hub."""
    parser = CommandParser(
        "push",
        "Upload a directory of weights or a LoRA adapter to the Hugging Face hub, with a model card.",
        "example:\n  push outputs/rl/weights/step_100 my-name/my-model --private",
    )
    parser.add_argument("directory", type=Path, help="weights/step_N of a run, or another Hugging Face directory")
    parser.add_argument("repo_id", help="repository on the hub, owner/name; created if it is missing")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--message", default="Upload weights", help="commit message")
    parser.add_argument("--token-var", default="HF_TOKEN", help="environment variable with a write token (HF_TOKEN)")
    parser.add_argument("--dry-run", action="store_true", help="print the model card and the files, upload nothing")
    parser.run(_push, argv)


def _push(options: argparse.Namespace) -> None:
    if options.repo_id.count("/") != 1:
        raise ValueError(f"{options.repo_id!r} is not a repository id: write it as owner/name")
    if options.dry_run:
        check_weights(options.directory)
        names = list_files(options.directory)
        card = [] if CARD in names else [write_card(options.directory, options.repo_id)]
        sys.stdout.write("\n".join([*card, *names]) + "\n")
        return
    token = os.environ.get(options.token_var)
    if not token:
        raise ValueError(f"{options.token_var} is not set: export a token with write access to the hub")
    url = push(options.directory, options.repo_id, private=options.private, token=token, message=options.message)
    sys.stdout.write(f"{url}\n")


if __name__ == "__main__":
    main()
