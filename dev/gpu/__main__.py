"""Command line of the GPU checks.

    python -m dev.gpu [NAME ...] [--out DIR] [--tiny] [--minutes N] [--again NAME ...] [--list]

NAME is a check, a stage (`kernels`) or a pattern (`training.*`). Finished checks are skipped when the command is run
again with the same folder, so that it continues where it was stopped.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from dev.gpu.bundle import BUNDLE, unpack_bundle
from dev.gpu.registry import CHECKS
from dev.gpu.runner import (
    FAILED,
    LOG_FILE,
    ROOT,
    SKIPPED,
    TABLE_FILE,
    choose_exit_code,
    format_line,
    format_table,
    load_results,
    matches,
    probe,
    run_checks,
    select,
)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m dev.gpu", description="Check everything that runs on a GPU.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="checks, stages or patterns; default: all")
    default = Path(os.environ.get("OUT") or ROOT / "outputs" / "gpu")
    parser.add_argument("--out", type=Path, default=default, help="folder of results; default: $OUT, or outputs/gpu")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, no bounds of speed; implied without a device")
    parser.add_argument("--minutes", type=float, help="start no further check after this time")
    parser.add_argument("--again", nargs="+", default=[], metavar="NAME", help="repeat these; failed: what failed")
    parser.add_argument("--list", action="store_true", help="print the names of the checks")
    return parser.parse_args()


def main() -> int:
    """Run the checks and print the table; returns the exit code."""
    arguments = parse_arguments()
    checks = select(CHECKS, arguments.names)
    if arguments.list:
        print(*(check.name for check in checks), sep="\n")
        return 0
    started = time.monotonic()
    deadline = None if arguments.minutes is None else started + 60 * arguments.minutes
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="prime_rl_gpu_") as scratch:
        site = unpack_bundle(BUNDLE, Path(scratch) / "site")
        paths = [str(ROOT / "src"), *([str(site)] if site else []), os.environ.get("PYTHONPATH", "")]
        os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
        machine = probe(out / LOG_FILE)
        tiny = arguments.tiny or not machine.num_devices
        print(
            f"==> {len(checks)} checks on {machine.device}{', tiny sizes' if tiny else ''}; results: {out}", flush=True
        )
        finished = load_finished(out, tiny, machine.device, arguments.again)
        for row in (finished[check.name] for check in checks if check.name in finished):
            print(format_line(row))
        (Path(scratch) / "files").mkdir()
        rows, left = run_checks(
            checks, machine, finished, out=out, scratch=Path(scratch) / "files", tiny=tiny, deadline=deadline
        )
    shown = [rows[check.name] for check in CHECKS if check.name in rows]
    (out / TABLE_FILE).write_text(format_table(shown, machine))
    counts = {status: sum(row["status"] == status for row in shown) for status in ("ok", FAILED, SKIPPED)}
    print(f"==> {', '.join(f'{num} {status}' for status, num in counts.items())} in {time.monotonic() - started:.0f} s")
    if failed := [row["name"] for row in shown if row["status"] == FAILED]:
        print(f"==> failed: {' '.join(failed)}")
    print(f"==> {out / TABLE_FILE}, log: {out / LOG_FILE}")
    if left:
        print(f"==> out of time, run the command again for the other {len(left)}: {' '.join(left)}")
    return choose_exit_code(shown, left)


def load_finished(out: Path, tiny: bool, device: str, again: list[str]) -> dict[str, dict[str, object]]:
    """The latest row of every check that need not be repeated."""
    known = {check.name for check in CHECKS}
    latest = {
        row["name"]: row
        for row in load_results(out)
        if row["tiny"] == tiny and row["device"] == device and row["name"] in known
    }
    return {
        name: row
        for name, row in latest.items()
        if row["status"] != SKIPPED and not matches(name, again) and not ("failed" in again and row["status"] == FAILED)
    }


if __name__ == "__main__":
    try:
        code = main()
    except (ValueError, RuntimeError) as error:
        code = f"error: {error}"
    raise SystemExit(code)
