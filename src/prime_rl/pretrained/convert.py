"""`convert`: a GGUF file to a Hugging Face directory, or a Hugging Face directory to a GGUF file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from prime_rl.pretrained.cache import build_once
from prime_rl.pretrained.fetch import KNOWN_MODELS, fetch_model


def convert(source: Path, target: Path, file_type: str = "f16") -> None:
    """Convert in the direction that the names give; raises `ValueError` rather than overwriting anything."""
    from prime_rl.pretrained.gguf_reader import convert_gguf
    from prime_rl.pretrained.gguf_writer import write_gguf

    if target.exists():
        raise ValueError(f"{target} exists: choose another name or remove it")
    if not source.exists() and str(source) in KNOWN_MODELS:
        source = fetch_model(str(source))
    if source.is_dir() and target.suffix == ".gguf":
        target.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(source, target, file_type)
    elif source.is_file() and target.suffix != ".gguf":
        build_once(target, lambda directory: convert_gguf(source, directory))
    elif not source.exists():
        known = f"a Hugging Face directory or a known name ({', '.join(KNOWN_MODELS)})"
        raise ValueError(f"{source} does not exist: give a GGUF file, {known}")
    else:
        raise ValueError(f"{source} to {target}: one must be a file named *.gguf, the other a directory")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Console script `convert`: exit code 0, or 2 for invalid input."""
    from prime_rl.pretrained.gguf_writer import FILE_TYPES

    parser = argparse.ArgumentParser(
        prog="convert",
        description="Convert a GGUF file to a Hugging Face directory, or such a directory to a GGUF file.",
        epilog="examples:\n  convert model.gguf model/\n  convert outputs/rl/weights/step_100 model.gguf --type q8_0",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, help="a GGUF file, a Hugging Face directory or a known name (smollm2)")
    parser.add_argument("target", type=Path, help="a new directory, or a new file named *.gguf")
    parser.add_argument("--type", choices=FILE_TYPES, default="f16", help="type of matrices in GGUF (default f16)")
    options = parser.parse_args(argv)
    try:
        convert(options.source, options.target, options.type)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None
    sys.stdout.write(f"{options.target}\n")
    raise SystemExit(0)


if __name__ == "__main__":
    main()
