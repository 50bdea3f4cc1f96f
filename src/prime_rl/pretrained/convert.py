"""`convert`: between GGUF files and Hugging Face directories, and LoRA adapters to full models."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from prime_rl.configuration.arguments import CommandParser
from prime_rl.pretrained.cache import build_once
from prime_rl.pretrained.fetch import KNOWN_MODELS, fetch_model
from prime_rl.transport.weights import WEIGHTS_FILE, adapt_config, is_adapter, read_model_files
from rollouts.training.json_files import read_json_file
from rollouts.training.model_config import GENERATION_FILE, read_eos_ids
from rollouts.training.tensor_files import save_tensors


def convert(source: Path, target: Path, file_type: str | None = None, base: str | None = None) -> None:
    """Convert in the direction that the names give; raises `ValueError` rather than overwriting anything.

    `file_type` is the type of the matrices in a GGUF file, by default f16. A LoRA adapter is merged into its base
    model: `base`, or the one that it names.
    """
    from prime_rl.pretrained.gguf_reader import convert_gguf
    from prime_rl.pretrained.gguf_writer import write_gguf

    if target.exists():
        raise ValueError(f"{target} exists: choose another name or remove it")
    if not source.exists() and str(source) in KNOWN_MODELS:
        source = fetch_model(str(source))
    if base is not None and not is_adapter(source):
        raise ValueError(f"--base {base}: {source} is not a LoRA adapter, leave it out")
    if file_type is not None and target.suffix != ".gguf":
        raise ValueError(f"--type {file_type} is for a target named *.gguf, not {target}: leave it out")
    if is_adapter(source):
        if target.suffix == ".gguf":
            raise ValueError(f"{source} is a LoRA adapter: merge it into a directory first, then convert that")
        build_once(target, lambda directory: merge_into(source, directory, base))
    elif source.is_dir() and target.suffix == ".gguf":
        target.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(source, target, file_type or "f16")
    elif source.is_file() and target.suffix != ".gguf":
        build_once(target, lambda directory: convert_gguf(source, directory))
    elif not source.exists():
        known = f"a Hugging Face directory or a known name ({', '.join(KNOWN_MODELS)})"
        raise ValueError(f"{source} does not exist: give a GGUF file, {known}")
    else:
        raise ValueError(f"{source} to {target}: one must be a file named *.gguf, the other a directory")


def merge_into(adapter_dir: Path, target: Path, base: str | None = None) -> None:
    """Write a full model into `target`: the base model with the adapter merged into its weights.

    The base may be an adapter itself. Tokenizer and end tokens are the adapter's, if it has them, and so is the size of
    the vocabulary.
    """
    from prime_rl.runtime.tokenizer import find_weight_files, resolve_model_dir
    from prime_rl.trainer.lora import load_adapter, merge_adapter
    from prime_rl.trainer.models.registry import read_tensors

    adapter = load_adapter(adapter_dir)
    base = base or adapter.base_model
    if not base:
        raise ValueError(f"{adapter_dir} does not name its base model: pass --base")
    base_dir = resolve_model_dir(base)
    if read_json_file(base_dir / "config.json").get("quantization_config"):
        raise ValueError(f"the base model {base} is quantized: give a bfloat16 version of it as --base")
    if not is_adapter(base_dir) and not find_weight_files(base_dir):
        raise ValueError(
            f"the base model {base} has no weights: give one with weights as --base; for an adapter of a random model "
            "(model.debug.random_init) there is none, train with model.lora.merge = true to publish full models"
        )
    tensors = merge_adapter(read_tensors(base_dir), adapter)
    has_tokenizer = any(adapter_dir.glob("tokenizer*"))
    eos_ids = read_eos_ids(adapter_dir / GENERATION_FILE)
    files = read_model_files(base_dir, adapter_dir if has_tokenizer else None, eos_ids=eos_ids)
    save_tensors(tensors, target / WEIGHTS_FILE, metadata={"format": "pt"})
    config = adapt_config(files.config, tensors, None)
    if "lm_head.weight" in adapter.tensors or "model.embed_tokens.weight" in adapter.tensors:
        tables = ("lm_head.weight", "model.embed_tokens.weight")
        sizes = {tensors[name].shape[0] for name in tables if name in tensors}
        if len(sizes) > 1:
            raise ValueError(
                f"{adapter_dir} has only one of lm_head and embed_tokens, with another number of tokens than its base: "
                "save both with peft (save_embedding_layers = True)"
            )
        config |= {"tie_word_embeddings": False, "vocab_size": sizes.pop()}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    files.write(target)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Console script `convert`: exit code 0, or 2 for invalid input."""
    from prime_rl.pretrained.gguf_writer import FILE_TYPES

    parser = CommandParser(
        "convert",
        "Convert a GGUF file to a Hugging Face directory and back, or merge a LoRA adapter into its model.",
        "examples:\n  convert model.gguf model/\n  convert outputs/rl/weights/step_100 model.gguf --type q8_0\n"
        "  convert outputs/lora/weights/step_100 merged/",
    )
    parser.add_argument("source", type=Path, help="a GGUF file, a model directory, a known name or a LoRA adapter")
    parser.add_argument("target", type=Path, help="a new directory, or a new file named *.gguf")
    parser.add_argument("--type", choices=FILE_TYPES, help="type of matrices in GGUF (default f16)")
    parser.add_argument("--base", help="base model of a LoRA adapter (default: the one that it names)")
    parser.run(_convert, argv)


def _convert(options: argparse.Namespace) -> None:
    convert(options.source, options.target, options.type, options.base)
    sys.stdout.write(f"{options.target}\n")


if __name__ == "__main__":
    main()
