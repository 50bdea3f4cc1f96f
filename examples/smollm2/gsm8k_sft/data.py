"""Download the training problems of GSM8K (MIT license), unless the file exists."""

from __future__ import annotations

import urllib.request
from pathlib import Path

URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/train.jsonl"
PATH = Path("outputs/smollm2_gsm8k_sft/train.jsonl")


def main() -> None:
    """Write `PATH`; a failed download leaves no file."""
    if PATH.is_file():
        return
    PATH.parent.mkdir(parents=True, exist_ok=True)
    try:
        with urllib.request.urlopen(URL, timeout=60) as response:
            rows = response.read()
    except OSError as error:
        raise SystemExit(
            f"error: no network ({error}): download grade_school_math/data/train.jsonl of openai/grade-school-math to "
            f"{PATH}, or train on the hub's copy with --data.name openai/gsm8k --data.subsets main"
        ) from error
    PATH.write_bytes(rows)


if __name__ == "__main__":
    main()
