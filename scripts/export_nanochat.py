"""Exports a nanochat checkpoint as a Hugging Face directory for `rl`, `inference`, `sft`, transformers and vLLM.

python -m scripts.export_nanochat --output_dir=outputs/nanochat/start
rl @ examples/nanochat/rl.toml
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from prime_rl.configuration.command import run_command
from prime_rl.utils.pydantic_config import BaseConfig


class ExportConfig(BaseConfig):
    """Checkpoint and output directory."""

    output_dir: Path
    """New directory to write: config.json, model.safetensors, tokenizer and chat template."""
    source: Literal["base", "mid", "sft", "rl", "prime_rl"] = "sft"
    """Stage of the checkpoint."""
    model_tag: str | None = None
    """Model tag, such as d20; unset: the deepest."""
    step: int | None = None
    """Checkpoint step; unset: the last."""


def export(config: ExportConfig) -> int:
    """Write the directory; the exit code."""
    from nanochat.checkpoint_manager import load_model
    from nanochat.hf_format import export_model
    from prime_rl.pretrained.cache import build_once

    if config.output_dir.exists():
        raise ValueError(f"{config.output_dir} exists: choose another --output_dir or remove it")
    model, tokenizer, meta = load_model(config.source, "cpu", model_tag=config.model_tag, step=config.step)
    build_once(config.output_dir, lambda directory: export_model(directory, model, tokenizer))
    print(f"{config.source} step {meta['step']} -> {config.output_dir}")
    return 0


if __name__ == "__main__":
    summary = str(__doc__).splitlines()[0]
    run_command("export_nanochat", ExportConfig, export, summary=summary, writes=lambda _: False)
