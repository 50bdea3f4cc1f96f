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
    """Directory to write: config.json, model.safetensors, tokenizer and chat template."""
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

    model, tokenizer, meta = load_model(config.source, "cpu", model_tag=config.model_tag, step=config.step)
    export_model(config.output_dir, model, tokenizer)
    print(f"{config.source} step {meta['step']} -> {config.output_dir}")
    return 0


if __name__ == "__main__":
    run_command("export_nanochat", ExportConfig, export, summary=str(__doc__).splitlines()[0])
