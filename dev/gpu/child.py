"""A child process of the runner: reads checks as JSON lines, runs them, and writes one JSON line for each.

python -m dev.gpu.child MODULE OUT SCRATCH [--tiny]      MODULE "probe" only describes the machine
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def main(argv: list[str]) -> None:
    """Serve until standard input ends, or a check raises: a CUDA error would stay in this process."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log

    def reply(row: dict[str, Any]) -> None:
        replies.write(json.dumps(row) + "\n")
        replies.flush()

    import torch

    if argv == ["--probe"]:
        num = torch.cuda.device_count() if torch.cuda.is_available() else 0
        name = f"{num} x {torch.cuda.get_device_name(0)}" if num else "cpu"
        has_vllm = importlib.util.find_spec("vllm") is not None
        reply({"device": name, "num_devices": num, "has_vllm": has_vllm})
        return
    from dev.gpu.context import Context, Measured, Skipped

    has_device = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_device else torch.device("cpu")
    context = Context(device, "--tiny" in argv, Path(argv[1]), Path(argv[0]))
    reply({})
    for line in sys.stdin:
        check = json.loads(line)
        torch.manual_seed(0)
        try:
            function = getattr(importlib.import_module(check["module"]), check["function"].partition(":")[2])
            found: Measured = function(context, **check["options"])
            reply({"number": float(found.number), "note": found.note, "values": found.values})
        except Skipped as reason:
            reply({"skipped": str(reason)})
        except Exception as error:
            print(f"--- {check['name']}", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            lines = str(error).strip().splitlines() or [""]
            reply({"error": f"{type(error).__name__}: {lines[0][:300]}"})
            return
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main(sys.argv[1:])
