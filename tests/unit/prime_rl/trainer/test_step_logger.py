"""Metrics and state of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from prime_rl.trainer.step_logger import WAITING, StepLogger
from prime_rl.utils.monitor import Monitor
from rollouts.training.backends.step import StepReport
from rollouts.training.batching import Share
from rollouts.training.rl_losses import TokenStats


class Perf:
    """Records the time of the step; its metrics are those that the console line needs."""

    seconds = -1.0

    def observe(self, share: Share, seconds: float) -> dict[str, float]:
        self.seconds = seconds
        return {"perf/throughput": sum(share.lengths), "perf/mfu": 0.0, "perf/peak_memory": 0.0}


def test_waiting_counts_in_the_step_and_in_its_throughput(tmp_path: Path) -> None:
    perf = Perf()
    steps = StepLogger(Monitor(tmp_path, "trainer"), cast(Any, perf), 4)
    steps.timer.seconds = {WAITING: 2.0, "forward_backward": 1.0}
    metrics = steps.log(StepReport(4, 0.5, 1e-3), TokenStats(), Share([], [3, 4]), {"optim/skipped_steps": 0}, {"x": 1})
    assert perf.seconds == metrics["time/step"] == 3.0
    assert (metrics["batch/tokens"], metrics["batch/samples"], metrics["x"]) == (7, 2, 1)
    assert metrics["batch/micro_batch_tokens"] == 0, "this rank has none"
    [row] = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert row["step"] == 4 and row["optim/grad_norm"] == 0.5 and row["process"] == "trainer"


def test_hang_reports_name_the_phase_and_its_step(tmp_path: Path) -> None:
    steps = StepLogger(Monitor(tmp_path, "trainer", silent=True), cast(Any, Perf()), 4)
    assert "an untimed section of step 4" in str(steps.describe_wait())
    with steps.timer(WAITING):
        assert "is waiting for the batch of step 4" in str(steps.describe_wait())
        assert "orchestrator" in str(steps.describe_wait())
