"""A `serve` process, and programs of the stock `tinker` client against it.

The client has an environment of its own: `make test-tinker` creates it; TINKER_PYTHON names another interpreter.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("TINKER_PYTHON", ROOT / ".venv-tinker" / "bin" / "python"))
TINY = ("--model.name", "tiny-qwen3", "--model.debug.random_init", "true", "--model.served_names", '["Qwen/Qwen3-8B"]')


class Server:
    """A `serve` process that writes to a folder."""

    def __init__(self, folder: Path, options: Sequence[str] = TINY) -> None:
        self.folder, self.options = folder, options
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "prime_rl", "serve", *self.options]
        command += ["--port", str(self.port), "--output_dir", str(self.folder / "serve")]
        with (self.folder / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        for _ in range(600):
            request = urllib.request.Request(f"http://127.0.0.1:{self.port}/api/v1/healthz", headers={"X-API-Key": "k"})
            try:
                with urllib.request.urlopen(request, timeout=5):
                    return
            except OSError:
                assert self.process.poll() is None, (self.folder / "serve.log").read_text()
                time.sleep(0.1)
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def environment(self, key: str = "tml-a") -> dict[str, str]:
        """Variables of a program of the client, without a network."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COVERAGE"))}
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(self.folder / "hf"), "NO_PROXY": "127.0.0.1"}
        return {
            **clean,
            **offline,
            "TINKER_BASE_URL": f"http://127.0.0.1:{self.port}",
            "TINKER_API_KEY": key,
        }
