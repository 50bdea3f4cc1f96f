"""The command of `monitor --replay`; tests/integration/test_replay.py runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.monitor.local_runs import LocalRun
from prime_rl.monitor.replay import Replay, build_command
from prime_rl.runtime.run_dir import RunDir
from prime_rl.trainer.config import SFTConfig, TrainConfig
from prime_rl.utils.pydantic_config import parse_argv


@pytest.mark.parametrize(("process", "config_cls"), [("trainer", TrainConfig), ("sft", SFTConfig)])
def test_a_replay_from_step_0_of_a_resumed_run_resumes_nothing(
    process: str, config_cls: type[TrainConfig | SFTConfig], tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    run.config(process).parent.mkdir(parents=True)
    run.config(process).write_text("resume = true\n[ckpt]\ninterval = 2\n")
    for start, expected in ((0, None), (2, 2)):
        plan = Replay(process, 3, start, ())
        command = build_command(LocalRun(run.root), plan, RunDir(tmp_path / "again"))
        config, _ = parse_argv(config_cls, command[3:], process, {})
        assert (config.ckpt and config.ckpt.resume_step) == expected


@pytest.mark.parametrize("section", ['type = "gloo"', "delta = true"])
def test_a_replay_writes_every_version_as_files(section: str, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.config("trainer").parent.mkdir(parents=True)
    run.config("trainer").write_text(f"[weight_broadcast]\n{section}\n[model]\ndtype = 'bfloat16'\n")
    command = build_command(LocalRun(run.root), Replay("trainer", 3, 0, ()), RunDir(tmp_path / "again"))
    config, _ = parse_argv(TrainConfig, command[3:], "trainer", {})
    assert (config.weight_broadcast.type, config.weight_broadcast.delta) == ("filesystem", False)
