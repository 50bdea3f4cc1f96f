"""`inference.backend = "sglang"`: complete runs of `rl` with a server process that implements SGLang's protocol."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from cli_runner import PYTHON_PATH, ROOT, THREE_FILES, metric_rows, runner, until

from prime_rl.runtime.machine import find_free_port
from rollouts.training.steps import step_path

FAKE = ROOT / "tests" / "fakes" / "fake_sglang.py"


def start_fake(port: int, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(FAKE), "--model-path", "tiny-qwen3", "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=log.open("ab"), stderr=subprocess.STDOUT, env=environment)

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        except httpx.HTTPError:
            return False

    until(answers, "the server to answer")
    return process


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapter"])
def test_a_whole_run_on_sglang_by_two_lines_of_config(lora: bool, tmp_path: Path) -> None:
    out, port = tmp_path / "out", find_free_port()
    options = ("--output_dir", out, "--inference.server.port", find_free_port(), "--inference.backend", "sglang")
    options += ("--inference.sglang.base-url", f"http://127.0.0.1:{port}", "--orchestrator.weight-check-interval", 1)
    options += ("--trainer.model.lora.rank", 4) if lora else ()
    fakes = [start_fake(port, tmp_path / "fake.log")]
    try:
        with runner(tmp_path / "said") as found:
            command = found.start("rl", *THREE_FILES, *options)
            # The server falls in the middle and comes back with other weights: nothing is sampled from them.
            until(lambda: step_path(out / "weights", 2).is_dir(), "version 2", command)
            fakes[-1].kill()
            fakes[-1].wait()
            fakes.append(start_fake(port, tmp_path / "fake.log"))
            assert command.wait(300) == 0, f"{command.out}\n{command.err}"
    finally:
        for fake in fakes:
            fake.kill()
            fake.wait()
    kls = [row["mismatch_kl/mean"] for row in metric_rows(out, "trainer", "mismatch_kl/mean")]
    assert len(kls) == 5 and max(kls) < 1e-6
    assert step_path(out / "weights", 5).is_dir()
    log = (out / "logs" / "orchestrator.log").read_text()
    assert "Verified version 5: engine log-probs match the trainer" in log
    assert "Reconnected to SGLang" in (out / "logs" / "inference.log").read_text()
