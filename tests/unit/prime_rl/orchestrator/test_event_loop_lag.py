"""Work of the orchestrator outside its loop: evaluation, pruning, cancellation, wait messages, early errors."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from fake_engine import FakeEngine, serve
from loguru import logger
from test_orchestrator import engine, environments, make_config, rows, run, trainer

from prime_rl.client.request_batcher import RequestBatcher
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.evaluation import EvalKind, EvalSchedule, find_last_finished
from prime_rl.orchestrator.orchestrator import orchestrate, run_orchestrator
from prime_rl.runtime.run_dir import RunDir
from prime_rl.transport.batches import FilesystemBatchSender
from rollouts.training.environments import Environment, load_environment
from rollouts.training.metrics import append_jsonl, load_jsonl
from rollouts.training.steps import complete_steps, publish_dir, step_path

__all__ = ["engine", "environments"]


def run_with_eval(
    config: OrchestratorConfig, environments: dict[str, Environment], judged: dict[str, Environment]
) -> list[str]:
    """Run, and return the lines that were logged."""
    lines: list[str] = []
    sink = logger.add(lines.append, level="INFO")

    async def main() -> None:
        with anyio.fail_after(60):
            await run_orchestrator(config, environments, judged)

    try:
        anyio.run(main)
    finally:
        logger.remove(sink)
    return lines


def test_evaluation_and_validation_over_http(
    engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path
) -> None:
    config = make_config(
        engine,
        tmp_path,
        max_steps=5,
        max_async_level=0,
        eval={"env": [{"id": "reverse-text", "name": "held"}], "interval": 2, "rollouts_per_example": 2},
        val={"num_examples": 3, "interval": 5},
    )
    with trainer(tmp_path, 5) as batches:
        lines = run_with_eval(config, environments, {"held": environments["reverse-text"]})
    assert len(batches) == 5
    found = [row for row in load_jsonl(tmp_path / "metrics.jsonl") if "eval/held/avg@2" in row]
    steps = [row["step"] for row in found]
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] == 5
    for row in found:
        assert row["process"] == "orchestrator" and 0 <= row["eval/held/avg@2"] <= row["eval/held/pass@2"] <= 1
        assert row["step"] <= row["eval/held/version/min"] <= row["eval/held/version/max"]
        results = list(load_jsonl(tmp_path / "evals" / f"step_{row['step']}" / "held" / "results.jsonl"))
        assert len(results) == 4 * 2
    validated = [row for row in load_jsonl(tmp_path / "metrics.jsonl") if "val_reward/mean" in row]
    assert [row["step"] for row in validated] == [0, 5]
    assert all(row["val_reward/mean"] == row["val_reward/reverse-text"] for row in validated)
    assert any("Evaluated held at version 5 | avg@2: " in line for line in lines)
    assert any("Validated version 5 | Val. Reward: " in line for line in lines)


def test_a_validation_reward_of_zero_is_logged(
    engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path
) -> None:
    config = make_config(engine, tmp_path, max_steps=1, max_async_level=0, val={"num_examples": 3, "interval": 1})
    given = engine.reply
    engine.reply = lambda body: "~" if engine.version == 1 else given(body)
    with trainer(tmp_path, 1):
        run_with_eval(config, environments, {})
    validated = [row for row in load_jsonl(tmp_path / "metrics.jsonl") if "val_reward/mean" in row]
    assert [row["val_reward/mean"] for row in validated if row["step"] == 1] == [0.0]


def test_failed_evaluation_is_logged_and_run_continues(
    engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path
) -> None:
    class Broken:
        id = "broken"

        def rows(self, split: str = "train") -> list[dict[str, Any]]:
            return environments["reverse-text"].rows(split)

        async def run_group(self, *args: Any, **kwargs: Any) -> list[Any]:
            raise OSError("no disk")

    config = make_config(engine, tmp_path, max_steps=2, eval={"env": [{"id": "broken"}], "interval": 1})
    with trainer(tmp_path, 2) as batches:
        lines = run_with_eval(config, environments, {"broken": Broken()})
    assert len(batches) == 2 and any("eval of version 0 failed" in line for line in lines)


@pytest.mark.parametrize("resumed", [False, True])
def test_eval_of_base_model_and_resumed_version(
    resumed: bool, engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path
) -> None:
    def config(steps: int, **extra: Any) -> OrchestratorConfig:
        ckpt = {"interval": 2, "resume_step": -1 if extra else None}
        expected = {"env": [{"id": "reverse-text"}], "interval": 100, "num_examples": 1, **extra}
        return make_config(engine, tmp_path, max_steps=steps, max_async_level=0, ckpt=ckpt, eval=expected)

    def save_half(step: int) -> None:
        publish_dir(step_path(tmp_path / "checkpoints", step) / "trainer", lambda path: None)

    with trainer(tmp_path, 2, on_batch=save_half):
        run_with_eval(config(2), environments, environments)
    extra = {"skip_eval_on_resume": not resumed}
    with trainer(tmp_path, 4, first=3, on_batch=save_half):
        run_with_eval(config(4, **extra), environments, environments)
    found = [r["step"] for r in load_jsonl(tmp_path / "metrics.jsonl") if "eval/reverse-text/avg@1" in r]
    assert found == ([0, 2, 2, 4] if resumed else [0, 2, 4])


def test_a_due_evaluation_runs_after_a_crash_during_it(
    engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path
) -> None:
    def config(**ckpt: Any) -> OrchestratorConfig:
        shared = {"interval": 100, "num_examples": 1}
        expected = {"env": [{"id": "reverse-text"}], **shared}
        return make_config(engine, tmp_path, max_steps=2, max_async_level=0, ckpt=ckpt, eval=expected, val=shared)

    def save_half(step: int) -> None:
        publish_dir(step_path(tmp_path / "checkpoints", step) / "trainer", lambda path: None)

    def finished() -> dict[str, list[int]]:
        found = list(load_jsonl(tmp_path / "metrics.jsonl"))
        names = {"eval": "eval/reverse-text/avg@1", "val": "val_reward/mean"}
        return {kind: [row["step"] for row in found if name in row] for kind, name in names.items()}

    with trainer(tmp_path, 2, on_batch=save_half):
        run_with_eval(config(), environments, environments)
    assert finished() == {"eval": [0, 2], "val": [0, 2]}
    # As if the last evaluations had not finished.
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] < 2 or "progress/samples" in line]
    (tmp_path / "metrics.jsonl").write_text("".join(kept))
    for _ in range(2):
        run_with_eval(config(resume_step=-1), environments, environments)
        assert finished() == {"eval": [0, 2], "val": [0, 2]}, "once"


def test_intervals_changed_at_a_resume_start_no_evaluation(
    engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path
) -> None:
    def save_half(step: int) -> None:
        publish_dir(step_path(tmp_path / "checkpoints", step) / "trainer", lambda path: None)

    def start(max_steps: int, val: int, **extra: Any) -> None:
        shared = {"max_steps": max_steps, "max_async_level": 0, "val": {"num_examples": 1, "interval": val}}
        run_with_eval(make_config(engine, tmp_path, **shared, **extra), environments, environments)

    with trainer(tmp_path, 3, on_batch=save_half):
        start(3, 100, ckpt={"interval": 2})
    added = {"env": [{"id": "reverse-text"}], "num_examples": 1, "interval": 1}
    with trainer(tmp_path, 4, first=3, on_batch=save_half):
        start(4, 2, ckpt={"interval": 2, "resume_step": 2}, eval=added)
    found = list(load_jsonl(tmp_path / "metrics.jsonl"))
    assert [row["step"] for row in found if "eval/reverse-text/avg@1" in row] == [3, 4]
    assert [row["step"] for row in found if "val_reward/mean" in row] == [0, 3, 4], "that of 3 is of the first attempt"


def test_a_schedule_counts_from_the_resume_with_its_interval(tmp_path: Path) -> None:
    schedule = EvalSchedule(EvalKind.EVAL, SimpleNamespace(output_dir=tmp_path), {}, 10, last=0)  # type: ignore[arg-type]

    def is_due(version: int, state: tuple[int, int] | None) -> bool:
        schedule.resume(version, None, state)
        return schedule.is_due(version, None)

    assert not is_due(25, None) and not is_due(25, (100, 0))
    assert schedule.state() == (10, 25)
    assert not is_due(28, (10, 25)) and is_due(31, (10, 25)), "due at 30, and not finished"
    assert is_due(19, (10, 0)) and schedule.state() == (10, 0)
    schedule.interval = 100
    assert is_due(31, (10, 25)), "by the interval until then"


def test_evaluations_of_an_abandoned_attempt_do_not_count(tmp_path: Path) -> None:
    def evaluate(attempt: int, *steps: int) -> None:
        row = {"process": "orchestrator", "attempt": attempt, "timeline/what": "eval"}
        append_jsonl(tmp_path / "metrics.jsonl", [{**row, "step": step} for step in steps])

    run = RunDir(tmp_path)
    assert find_last_finished(tmp_path, EvalKind.EVAL, 9) == 0
    run.begin_attempt("orchestrator", 0)
    evaluate(0, 0, 2, 4, 6)
    assert [find_last_finished(tmp_path, EvalKind.EVAL, version) for version in (3, 6, 9)] == [2, 6, 6]
    run.begin_attempt("orchestrator", 3)
    assert [find_last_finished(tmp_path, EvalKind.EVAL, version) for version in (3, 6)] == [2, 2]
    evaluate(1, 4)
    assert find_last_finished(tmp_path, EvalKind.EVAL, 6) == 4 and find_last_finished(tmp_path, EvalKind.VAL, 6) == 0


@pytest.mark.parametrize(
    ("extra", "halves", "left"),
    [
        ({}, (), []),
        ({"keep_rollouts": True}, (), [1, 2, 3, 4]),
        ({"ckpt": {"interval": 2}}, (2,), [3, 4]),
        ({"ckpt": {"interval": 2}}, (), [1, 2, 3, 4]),
    ],
)
def test_batches_pruned_once_trained_and_checkpointed(
    extra: dict[str, Any],
    halves: tuple[int, ...],
    left: list[int],
    engine: FakeEngine,
    environments: dict[str, Environment],
    tmp_path: Path,
) -> None:
    def save_half(step: int) -> None:
        if step in halves:
            publish_dir(step_path(tmp_path / "checkpoints", step) / "trainer", lambda path: None)

    with trainer(tmp_path, 4, on_batch=save_half) as batches:
        run(make_config(engine, tmp_path, max_async_level=0, **extra), environments)
    assert len(batches) == 4 and complete_steps(tmp_path / "rollouts") == left


def test_stale_rollout_is_cancelled_and_restarted(
    engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of the second batch hangs: a weight update cancels it, and its group is restarted."""

    async def alone(self: RequestBatcher, body: Any) -> None:
        """Requests come one by one and in their order, so that the thirteenth belongs to the second batch."""

    monkeypatch.setattr(RequestBatcher, "request", alone)
    released = threading.Event()
    stuck: set[int] = set()
    original = engine.chat

    async def chat(request: Any) -> Any:
        if len(engine.requests) >= 12 and not stuck:
            stuck.add((await request.json())["seed"])
            while not await request.is_disconnected():
                await asyncio.sleep(0.01)
            released.set()
        return await original(request)

    engine.chat = chat  # type: ignore[method-assign]
    with serve(engine), trainer(tmp_path, 3) as batches:
        config = make_config(engine, tmp_path, max_steps=3, max_async_level=1, max_off_policy_steps=0)
        run(config, environments)
    assert released.is_set(), "the engine was notified"
    assert len(batches) == 3 and all(len(batch) == 8 for batch in batches)
    assert rows(tmp_path)[-1]["restarts/off_policy"] >= 1


def test_wait_messages(
    engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_rl.orchestrator.waiting.LOG_INTERVAL_S", 0.05)
    engine.latency_s = 0.4
    with trainer(tmp_path, 1):
        lines = run_with_eval(make_config(engine, tmp_path, max_steps=1), environments, {})
    assert any("Waiting for the inference server (0 s): groups running=2" in line for line in lines)


def test_skip_verification_runs_no_rewards(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = {"num_train_examples": 8, "num_eval_examples": 2, "min_length": 3, "max_length": 4, "system_prompt": ""}
    environment = load_environment("reverse-text", args, score=False)

    def scored(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("scored")

    monkeypatch.setattr(environment.env.rubric, "score_group", scored)  # type: ignore[attr-defined]
    config = make_config(engine, tmp_path, max_steps=1, buffer={"skip_verification": True})
    with trainer(tmp_path, 1) as batches:
        run(config, {"reverse-text": environment})
    assert [sample.reward for sample in batches[0]] == [0.0] * 8


def without_reward(row: dict[str, Any], env: str, version: int) -> bool:
    return True


async def waiting(row: dict[str, Any], env: str, version: int, reward: float | None) -> bool:
    return True


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ckpt": {"resume_step": 7}}, r"ckpt\.resume_step = 7: .* complete: none"),
        ({"buffer": {"filters": [{"name": "zero_varince"}]}}, "buffer.filters: 'zero_varince' is not one of"),
        ({"buffer": {"curriculum": "nowhere:f"}}, "buffer.curriculum = 'nowhere:f' cannot be imported"),
        (
            {"buffer": {"curriculum": f"{__name__}:without_reward"}},
            r"buffer\.curriculum = .* does not take the arguments \(row, env, version, reward\): .*'reward'",
        ),
        ({"buffer": {"curriculum": f"{__name__}:waiting"}}, r"buffer\.curriculum = .* is async: write it with def"),
    ],
)
def test_invalid_input_raises_before_loading(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = OrchestratorConfig.model_validate(
        {"output_dir": tmp_path, "env": [{"id": "no-such-environment"}], **values}
    )
    with pytest.raises(ValueError, match=message):
        orchestrate(config)


def test_old_batches_are_moved_before_loading(tmp_path: Path) -> None:
    """A trainer that is ready before the environments would read them."""
    FilesystemBatchSender(tmp_path / "rollouts").send(2, [])
    values = {"env": [{"id": "no-such-environment"}], "ckpt": {"resume_step": -1}, "output_dir": tmp_path}
    with pytest.raises(ValueError, match="no-such-environment"):
        orchestrate(OrchestratorConfig.model_validate(values))
    assert not (tmp_path / "rollouts" / "step_2").exists()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 3 * 8),
        ({"oversampling_factor": 1.5}, 28),
        ({"max_concurrent": 12}, 12),
        ({"max_concurrent": 12, "eval": {"max_concurrent": 100}}, 112),
        ({"eval": {}, "val": {"num_examples": 3, "rollouts_per_example": 2}}, 24 + 256 + 6),
    ],
)
def test_files_may_be_open_for_all_rollouts(
    values: dict[str, Any], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reached(Exception):
        pass

    def ensure_open_files(in_flight: int) -> None:
        assert in_flight == expected
        raise Reached

    monkeypatch.setattr("prime_rl.client.http.ensure_open_files", ensure_open_files)
    monkeypatch.setattr("prime_rl.utils.logger.setup_logger", lambda *_: None)
    sizes = {"batch_size": 8, "rollouts_per_example": 4}
    with pytest.raises(Reached):
        orchestrate(OrchestratorConfig.model_validate({"output_dir": tmp_path, **sizes, **values}))
