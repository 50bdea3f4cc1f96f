"""The page of a run that starts: how to open it, or the page itself while the run runs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prime_rl.runtime.process_tree import TOKEN_VARIABLE, die_with_parent

STOP_S = 5.0


@contextmanager
def offer_page(output_dir: Path, is_open: bool) -> Iterator[None]:
    """Print how to open the page; with `is_open`, serve it while the block runs and open it in the browser.

    No-op in processes that another command started, such as ranks.
    """
    if TOKEN_VARIABLE in os.environ or "WORLD_SIZE" in os.environ:
        yield
        return
    if not is_open:
        sys.stdout.write(f"Page of this run: monitor {shlex.quote(str(output_dir))} --open\n")
        sys.stdout.flush()
        yield
        return
    command = [sys.executable, "-m", "prime_rl.monitor.wandb_monitor", str(output_dir), "--open"]
    page = subprocess.Popen(  # in a session of its own: Ctrl-C reaches this process, which then stops the page
        command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent(os.getpid()), start_new_session=True
    )
    try:
        yield
    finally:
        page.terminate()
        try:
            page.wait(STOP_S)
        except subprocess.TimeoutExpired:
            page.kill()
            page.wait()
        sys.stdout.write(f"The page is no longer served; again: monitor {shlex.quote(str(output_dir))} --open\n")
