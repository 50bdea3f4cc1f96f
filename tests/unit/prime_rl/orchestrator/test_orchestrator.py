"""The orchestrator's real code against a scripted engine over HTTP and a trainer thread that publishes weights."""

from __future__ import annotations

import contextlib
import json
import math
import re
import statistics
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import anyio
import pytest
from fake_engine import FakeEngine, free_port, serve
from loguru import logger

from prime_rl.orchestrator.advantages import build_advantages
from prime_rl.orchestrator.buffer import PromptBuffer
from prime_rl.orchestrator.checkpoint import CheckpointStore
from prime_rl.orchestrator.config import AdvantageConfig, BufferConfig, OrchestratorCkptConfig, OrchestratorConfig
from prime_rl.orchestrator.filters import build_group_filter
from prime_rl.orchestrator.metrics import compute_batch_metrics, compute_error_metrics, drop_overlong
from prime_rl.orchestrator.orchestrator import run_orchestrator
from prime_rl.orchestrator.policy_version import PolicyVersion
from prime_rl.orchestrator.rollout_manager import GroupGenerator, find_drop_reason
from prime_rl.orchestrator.server_pool import ServerPool
from prime_rl.orchestrator.setup import Orchestrator
from prime_rl.orchestrator.weight_relay import WeightRelay
from prime_rl.runtime.run_dir import CKPT_PARTS, RunDir
from prime_rl.transport.batches import FilesystemBatchReceiver, FilesystemBatchSender
from prime_rl.transport.file_watch import wait_for, wait_for_blocking
from rollouts.agents import Turn
from rollouts.training.agent_integration import Rollout
from rollouts.training.environments import Environment, load_environment
from rollouts.training.metrics import load_jsonl
from rollouts.training.steps import complete_steps, is_complete, publish_dir, publish_step, step_path
from rollouts.training.types import Sample, Status
from rollouts.training.weight_sync import PrimeEngine, WeightSyncError, sync_weights_to_engines


def learner(body: dict[str, Any]) -> str:
    """Right or wrong by the request's seed."""
    text = body["messages"][-1]["content"]
    return f"<reversed_text>{text[::-1] if body['seed'] % 2 else text}</reversed_text>"


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with serve(FakeEngine(reply=learner)) as engine:
        yield engine


@pytest.fixture(scope="module")
def environments() -> dict[str, Environment]:
    args = {"num_train_examples": 12, "num_eval_examples": 4, "min_length": 3, "max_length": 6, "system_prompt": ""}
    return {"reverse-text": load_environment("reverse-text", args)}


def make_config(engine: FakeEngine, out: Path, **extra: Any) -> OrchestratorConfig:
    values = {
        "client": {"base_url": [engine.base_url]},
        "batch_size": 8,
        "rollouts_per_example": 4,
        "max_steps": 4,
        "output_dir": out,
        "weights_timeout": 60,
        "inference_timeout": 30,
    }
    return OrchestratorConfig.model_validate(values | extra)


def run(config: OrchestratorConfig, environments: dict[str, Environment]) -> None:
    async def main() -> None:
        with anyio.fail_after(60):
            await run_orchestrator(config, environments)

    anyio.run(main)


@contextlib.contextmanager
def trainer(
    out: Path, last: int, first: int = 1, on_batch: Callable[[int], None] = lambda step: None
) -> Iterator[list]:
    """A trainer that receives every batch and publishes the version it trains; yields what it received."""
    batches: list[list[Sample]] = []
    stop = threading.Event()

    def work() -> None:
        receiver = FilesystemBatchReceiver(out / "rollouts")
        for step in range(first, last + 1):
            while not stop.is_set():
                try:
                    batches.append(receiver.receive(step, timeout_s=0.5))
                    break
                except TimeoutError:
                    continue
            if stop.is_set():
                return
            on_batch(step)
            publish_version(out, step)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield batches
    finally:
        stop.set()
        thread.join(timeout=30)
        assert not thread.is_alive()


def publish_version(out: Path, step: int, digest: str = "aa") -> None:
    manifest = json.dumps(
        {"schema": 1, "step": step, "tensors": {"w": {"dtype": "float32", "shape": [], "digest": digest}}}
    )
    publish_step(out / "weights", step, lambda path: (path / "manifest.json").write_text(manifest) and None)


def rows(out: Path, process: str = "orchestrator") -> list[dict[str, Any]]:
    return [row for row in load_jsonl(out / "metrics.jsonl") if "reward/mean" in row]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_main_loop(level: int, engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path) -> None:
    engine.latency_s = 0.01
    with trainer(tmp_path, 4) as batches:
        run(make_config(engine, tmp_path, max_async_level=level), environments)
    assert [len(batch) for batch in batches] == [8] * 4
    indices = [[(s.group_index, s.index) for s in batch] for batch in batches]
    assert indices == [[(2 * step + g, i) for g in range(2) for i in range(4)] for step in range(4)]
    for step, batch in enumerate(batches, start=1):
        for sample in batch:
            sample.validate()
            assert sample.advantages is not None and set(sample.advantages[: sample.loss_mask.index(1.0)]) <= {0.0}
            assert all(0 <= step - 1 - version <= level for _, version in sample.versions)
        for g in range(2):
            group = batch[4 * g : 4 * g + 4]
            mean = sum(s.reward for s in group) / 4
            assert [s.advantages[-1] for s in group] == pytest.approx([s.reward - mean for s in group])
    assert engine.version == 4
    metrics = rows(tmp_path)
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert metrics[-1]["progress/total_samples"] == 32 and metrics[0]["batch/reverse-text"] == 1.0
    expected = {
        "reward/mean", "reward/reverse-text", "metrics/exact_match", "seq_len/mean", "completion_len/max", "time/step",
        "time/generate_completions", "time/update_weights", "perf/throughput", "batch/async_level", "error/mean",
        "batch/off_policy_level/max", "batch/solve_none", "progress/ckpt_step", "is_truncated/mean",
    }  # fmt: skip
    assert expected <= set(metrics[0])
    samples = list(load_jsonl(tmp_path / "samples.jsonl"))
    assert len(samples) == 32 and {"prompt", "completion", "reward", "advantage", "versions", "tokens"} <= set(
        samples[0]
    )
    assert all(row["answer"] == row["prompt_text"][::-1] for row in samples) and samples[0]["info"] is None
    timeline = [r["timeline/what"] for r in load_jsonl(tmp_path / "metrics.jsonl") if "timeline/what" in r]
    assert timeline.count("generate") == 4 and 1 <= timeline.count("update_weights") <= 4


def test_same_seed_same_run_at_level_0(
    engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path
) -> None:
    received = []
    for name, latency in (("a", 0.0), ("b", 0.02)):
        engine.latency_s = latency
        with trainer(tmp_path / name, 3) as batches:
            run(make_config(engine, tmp_path / name, max_async_level=0, max_steps=3), environments)
        received.append([[(s.tokens, s.advantages, s.versions) for s in batch] for batch in batches])
    assert received[0] == received[1]
    assert "reload" in engine.updates, "the second run began with the first run's weights"


def test_resumed_equals_uninterrupted_at_level_0(
    engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path
) -> None:
    def config(name: str, **extra: Any) -> OrchestratorConfig:
        return make_config(engine, tmp_path / name, max_async_level=0, max_steps=5, **extra)

    with trainer(tmp_path / "whole", 5) as whole:
        run(config("whole"), environments)
    out = tmp_path / "cut"

    def save_half(step: int) -> None:
        publish_dir(step_path(out / "checkpoints", step) / "trainer", lambda path: None)

    async def run_until_batch_4() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_orchestrator, config("cut", ckpt={"interval": 1}), environments)
            await wait_for(
                lambda: is_complete(out / "rollouts" / "step_4") or None, out / "rollouts", timeout_s=60, what="batch 4"
            )
            tasks.cancel_scope.cancel()

    with trainer(out, 3, on_batch=save_half) as first:
        anyio.run(run_until_batch_4)
    assert (out / "rollouts" / "step_4").is_dir(), "a batch beyond the checkpoint is left over"
    engine.version = 0  # a new server
    with trainer(out, 5, first=4) as second:
        run(config("cut", ckpt={"interval": 1, "resume_step": -1}), environments)
    assert engine.updates[-3] == "step_3", "the server begins with the version of the checkpoint"
    assert engine.updates[-2:] == ["step_4", "step_5"]
    assert [[(s.tokens, s.advantages) for s in b] for b in first[:3] + second[-2:]] == [
        [(s.tokens, s.advantages) for s in b] for b in whole
    ]
    assert rows(out)[-1]["progress/total_samples"] == 40


def test_self_play_resumes_with_its_baselines(engine: FakeEngine, tmp_path: Path) -> None:
    """Games of one rollout: advantages compare with running means of each seat, which a checkpoint keeps."""
    nim = {"nim": load_environment("nim", {"num_train_examples": 24})}
    engine.reply = lambda body: str(1 + body["seed"] % 3)

    def config(name: str, max_steps: int, **extra: Any) -> OrchestratorConfig:
        play = {"rollouts_per_example": 1, "max_async_level": 0, "advantage": {"baseline": "role", "decay": 0.8}}
        ckpt = {"interval": 1, **extra}
        return make_config(engine, tmp_path / name, batch_size=6, max_steps=max_steps, ckpt=ckpt, **play)

    def save_half(step: int) -> None:
        publish_dir(step_path(tmp_path / "cut" / "checkpoints", step) / "trainer", lambda path: None)

    with trainer(tmp_path / "whole", 4) as whole:
        run(config("whole", 4), nim)
    with trainer(tmp_path / "cut", 2, on_batch=save_half) as first:
        run(config("cut", 2), nim)
    with trainer(tmp_path / "cut", 4, first=3) as second:
        run(config("cut", 4, resume_step=-1), nim)
    found, expected = (
        [[(s.seat, s.tokens, s.advantages) for s in b] for b in runs] for runs in (first + second, whole)
    )
    assert found == expected and {seat for batch in found for seat, *_ in batch} == {"first", "second"}
    first_moves = [s.advantages for s in whole[0] if s.seat == "first" and s.group_index == 0]
    assert {abs(advantage) for advantages in first_moves for advantage in advantages or ()} <= {0.0, 1.0}
    assert any(abs(s.advantages[-1]) not in (0.0, 1.0) for s in whole[-1] if s.advantages), "the mean has moved"
    row = rows(tmp_path / "whole")[-1]
    assert (row["progress/problems"], row["progress/samples"], row["progress/total_samples"]) == (6, 6, 24)
    assert row["reward/nim/first"] == -row["reward/nim/second"] == row["metrics/reward_first"]
    assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/in_flight"] > 0


def test_failures_are_dropped_counted_and_bounded(
    engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path
) -> None:
    """One prompt always fails: it is quarantined. One seed fails: its rollout is missing, its group is not."""
    poison = environments["reverse-text"].rows()[1]["prompt"][-1]["content"]
    config = make_config(engine, tmp_path, max_async_level=0, max_steps=7, max_retries=1)
    seen: set[int] = set()

    def fail(body: dict[str, Any]) -> int | None:
        seen.add(body["seed"])
        if body["messages"][-1]["content"] == poison:
            return 400
        first = min(seen)
        return 400 if body["seed"] in (first, first + 1) and len(seen) == 1 else None

    engine.fail = fail
    with trainer(tmp_path, 7) as batches:
        run(config, environments)
    assert 1 not in {s.group_index for batch in batches for s in batch}
    metrics = rows(tmp_path)
    assert metrics[-1]["error/quarantined"] == 1 and metrics[0]["error/BadRequestError"] >= 4
    # 12 prompts, 14 groups are needed and one prompt yields none: the second epoch meets it again at most once
    poisoned = [r for r in engine.requests if r["messages"][-1]["content"] == poison]
    assert len(poisoned) == 4 * (1 + config.max_retries), "a quarantined prompt is not drawn again"


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        (["APIConnectionError", "RolloutTimeout"], "engine_error"),
        (["RolloutTimeout", None], "engine_error"),
        (["RolloutTimeout", "TypeError"], "all_failed"),
        (["InfraError", "APIConnectionError"], "engine_error"),
        (["WorkerDied", "WorkerDied"], "all_failed"),
        (["TypeError", None], "too_few"),
        ([None, None], "too_few"),
    ],
)
def test_reasons_of_groups_with_too_few_rollouts(errors: list[str | None], reason: str) -> None:
    statuses = [Status.FAILED if kind else Status.COMPLETED for kind in errors]
    rollouts = [Rollout(prompt="", status=s, error_type=kind) for s, kind in zip(statuses, errors, strict=True)]
    assert find_drop_reason(rollouts) == reason


@pytest.mark.parametrize("held", [0, 2])
def test_restarted_engine_does_not_change_results(
    held: int,
    engine: FakeEngine,
    environments: dict[str, Environment],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It restarts with version 0 during a batch and serves nothing before it has the current version."""
    monkeypatch.setattr("prime_rl.utils.client.RETRY_AFTER_S", 0.005)
    monkeypatch.setattr("prime_rl.orchestrator.server_pool.HEALTH_CHECK_INTERVAL_S", 0.02)
    seen, falls = list[Any](), list[int]()

    def fall(body: dict[str, Any]) -> int | None:
        if engine.version == held and not falls and engine.requests[3:]:
            falls.append(held)
            engine.version, engine.awaits_weights = 0, True
        return 503 if engine.awaits_weights else None

    for name in ("whole", "fallen"):
        engine.fail = fall if name == "fallen" else lambda body: None
        engine.requests.clear()
        engine.version = 0
        config = make_config(engine, tmp_path / name, max_steps=4, max_async_level=0)
        with trainer(tmp_path / name, 4) as batches:
            run(config, environments)
        seen.append([[(s.group_index, s.index, s.tokens, s.versions) for s in batch] for batch in batches])
    assert falls == [held] and engine.updates[-5:].count(f"step_{held}" if held else "reload") >= 1
    assert seen[0] == seen[1]


def test_external_engine_restart_is_detected(
    engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers at once, with the weights of the start: not for long."""
    monkeypatch.setattr("prime_rl.orchestrator.server_pool.HEALTH_CHECK_INTERVAL_S", 0.01)
    config, falls = make_config(engine, tmp_path, max_steps=4, max_async_level=0), list[int]()

    def fall(body: dict[str, Any]) -> int | None:
        if engine.version == 2 and not falls:
            falls.append(2)
            engine.version, engine.latency_s = 0, 0.3
        return None

    engine.fail = fall
    with trainer(tmp_path, 4):
        run(config, environments)
    assert falls and engine.updates.count("step_2") == 2


def test_lost_engine_ends_run_with_address(
    engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_rl.orchestrator.server_pool.HEALTH_CHECK_INTERVAL_S", 0.02)
    config = make_config(engine, tmp_path, max_steps=4, inference_timeout=0.2)

    def leave(step: int) -> None:
        for module in ("servers", "server_pool"):
            monkeypatch.setattr(
                f"prime_rl.orchestrator.{module}.read_health",
                lambda client: (_ for _ in ()).throw(ConnectionError("gone")),
            )
        engine.fail = lambda body: 503

    with trainer(tmp_path, 4, on_batch=leave), pytest.raises(BaseExceptionGroup) as error:
        run(config, environments)
    assert re.search(r"http://127.* has not recovered for 0.2 s \(gone\)", str(find_leaf(error.value)))


def test_failing_engine_ends_run_with_reason(
    engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path
) -> None:
    engine.fail = lambda body: 500
    config = make_config(engine, tmp_path, max_retries=0, batch_size=4, max_async_level=0)
    with pytest.raises(BaseExceptionGroup) as caught:
        run(config, environments)
    message = str(find_leaf(caught.value))
    assert "groups in a row were dropped" in message and "engine_error (10)" in message and "answered 500" in message


def find_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def test_without_engines(environments: dict[str, Environment], tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    config = OrchestratorConfig(client={"base_url": [url]}, output_dir=tmp_path, inference_timeout=0.3)
    with pytest.raises(TimeoutError, match=rf"inference server at {url[:-3]} was not ready within 0\.3 s"):
        run(config, environments)


@pytest.mark.parametrize("is_quick", [True, False])
def test_trainer_with_other_data(
    is_quick: bool,
    engine: FakeEngine,
    environments: dict[str, Environment],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fake trainer publishes fewer versions than steps: they are relayed, one warning is logged, nothing hangs."""

    def publish_all(wait_for_batches: bool) -> None:
        for step in (1, 2, 3):
            if wait_for_batches:
                path = step_path(tmp_path / "rollouts", step)
                wait_for_blocking(lambda path=path: is_complete(path) or None, path.parent, timeout_s=30, what="batch")
            publish_version(tmp_path, step)

    monkeypatch.setattr("prime_rl.orchestrator.weight_relay.UNREAD_GRACE_S", 1.0)
    thread = threading.Thread(target=publish_all, args=(not is_quick,), daemon=True)
    thread.start()
    if is_quick:
        thread.join(timeout=30)
    lines: list[str] = []
    sink = logger.add(lines.append, level="WARNING")
    try:
        run(make_config(engine, tmp_path, max_steps=6, max_async_level=1), environments)
    finally:
        logger.remove(sink)
    thread.join(timeout=30)
    assert len(rows(tmp_path)) == 6 and engine.version == 3
    assert sum("Batches unread" in line for line in lines) == 1


def test_silent_trainer_times_out(
    engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_rl.orchestrator.weight_relay.LOG_INTERVAL_S", 0.05)
    with pytest.raises(BaseExceptionGroup) as caught:
        run(make_config(engine, tmp_path, weights_timeout=0.3), environments)
    assert str(find_leaf(caught.value)).endswith("not running; if its steps take longer, raise weights_timeout")


def test_overlong_samples_are_dropped_and_counted(
    engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path
) -> None:
    engine.reply = lambda body: "x" * 30 if body["seed"] % 3 == 0 else learner(body)
    config = make_config(engine, tmp_path, max_steps=2, max_async_level=0, seq_len=50, max_concurrent=4)
    engine.reply = lambda body: "x" * 90 if body["seed"] % 3 == 0 else learner(body)
    with trainer(tmp_path, 2) as batches:
        run(config, environments)
    assert all(len(s.tokens) <= 50 for batch in batches for s in batch)
    metrics = rows(tmp_path)
    assert [len(batch) for batch in batches] == [round(8 * (1 - row["batch/overlong"])) for row in metrics]
    assert any(row["batch/overlong"] > 0 for row in metrics)
    assert sum(r["status"] == "truncated" for r in load_jsonl(tmp_path / "samples.jsonl")) == 16 - sum(
        map(len, batches)
    )


@pytest.mark.parametrize("zeroed", [False, True])
def test_zero_reward_of_truncated_rollouts(
    zeroed: bool, engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path
) -> None:
    """An answer that is right but does not end within max_tokens."""

    def right(body: dict[str, Any]) -> str:
        return f"<reversed_text>{body['messages'][-1]['content'][::-1]}</reversed_text>"

    # `finish_reason` is "length" when the text fills max_tokens; the tag's end is within, the filler is not.
    engine.reply = lambda body: right(body) + ("." * 200 if body["seed"] % 2 else "")
    config = make_config(
        engine, tmp_path, max_steps=1, max_async_level=0, zero_truncated_completions=zeroed, sampling={"max_tokens": 60}
    )
    with trainer(tmp_path, 1):
        run(config, environments)
    by_status: dict[str, set[float]] = {}
    for row in load_jsonl(tmp_path / "samples.jsonl"):
        by_status.setdefault(row["status"], set()).add(row["reward"])
    assert by_status == {"completed": {1.0}, "truncated": {0.0 if zeroed else 1.0}}


def test_directory_of_another_run_raises(
    engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path
) -> None:
    FilesystemBatchSender(tmp_path / "rollouts").send(2, [])
    with pytest.raises(ValueError, match=r"holds an earlier run \(rollouts up to step_2\)"):
        run(make_config(engine, tmp_path), environments)
    with trainer(tmp_path, 1) as batches:  # resuming: the run that died before its first checkpoint
        run(make_config(engine, tmp_path, max_steps=1, ckpt={"resume_step": -1}), environments)
    assert len(batches) == 1 and not (tmp_path / "rollouts" / "step_2").exists()
    assert complete_steps(tmp_path / "attempts" / "1" / "rollouts") == [2], "moved away, not removed"


def test_resume_without_checkpoint_keeps_weights(
    engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path
) -> None:
    FilesystemBatchSender(tmp_path / "rollouts").send(3, [])
    publish_version(tmp_path, 2)
    with pytest.raises(
        ValueError, match=r"no complete checkpoint(.|\n)*--model.name .*weights/step_2 --output-dir NEW"
    ):
        run(make_config(engine, tmp_path, ckpt={"resume_step": -1}), environments)
    assert complete_steps(tmp_path / "rollouts") == [3] and complete_steps(tmp_path / "weights") == [2]


def test_environments_with_different_reward_scales(
    engine: FakeEngine, environments: dict[str, Environment], tmp_path: Path
) -> None:
    class Louder:
        id = "louder"

        def rows(self, split: str = "train") -> list[dict[str, Any]]:
            return [{**row, "task": "louder"} for row in environments["reverse-text"].rows()[:4]]

        async def run_group(self, *args: Any, **kwargs: Any) -> list[Any]:
            rollouts = await environments["reverse-text"].run_group(*args, **kwargs)
            for rollout in rollouts:
                rollout.reward *= 100
            return rollouts

    both = {**environments, "loud": Louder()}
    buffer = PromptBuffer(both, BufferConfig(), 0, PolicyVersion())
    mixed = [buffer.draw()[1]["env"] for _ in range(16)]
    assert mixed.count("loud") == 4 and all(mixed[i : i + 4].count("loud") == 1 for i in range(0, 16, 4))
    with trainer(tmp_path, 2) as batches:
        run(make_config(engine, tmp_path, batch_size=16, max_steps=2), both)
    metrics = rows(tmp_path)
    assert metrics[0]["reward/loud"] > 1 >= metrics[0]["reward/reverse-text"]
    assert metrics[0]["batch/loud"] == metrics[0]["batch/reverse-text"] / 3 == 0.25
    assert {s.metadata["env"] for s in batches[0]} == {"loud", "reverse-text"}


def test_groups_rotate_over_servers(environments: dict[str, Environment], tmp_path: Path) -> None:
    with serve(FakeEngine(learner)) as a, serve(FakeEngine(learner)) as b, trainer(tmp_path, 2):
        config = make_config(a, tmp_path, max_steps=2, client={"base_url": [a.base_url, b.base_url]}, max_async_level=0)
        run(config, environments)
    assert len(a.requests) == len(b.requests) == 8 and a.version == b.version == 2


def test_weight_sync_verifies_version_and_tensors(engine: FakeEngine, tmp_path: Path) -> None:
    publish_version(tmp_path, 3)
    prime = PrimeEngine(engine.base_url)

    class Other:
        async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
            return {"success": True}

    path = str(tmp_path / "weights" / "step_3")
    answers = anyio.run(sync_weights_to_engines, [Other(), prime], path)
    assert answers[0] == {"success": True} and answers[1]["version"] == 3

    async def lie(checkpoint_path: str) -> dict[str, Any]:
        return {"success": False, "message": "no memory"}

    other = Other()
    other.update_weights_from_checkpoint = lie  # type: ignore[method-assign]
    gone = PrimeEngine(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(WeightSyncError) as error:
        anyio.run(sync_weights_to_engines, [other, prime, gone], path)
    assert [state for _, state in error.value.states][:2] == ["no memory", "ok"]
    assert "ConnectError" in error.value.states[2][1] and str(gone) in str(error.value)
    for bad in ([], path), ([prime], ""):
        with pytest.raises(ValueError, match="pass"):
            anyio.run(sync_weights_to_engines, *bad)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"version": 2, "digests": {}}, "expected version 3, the server reports 2"),
        ({"version": 3, "digests": {"w": "bb"}}, "tensor w arrived with digest bb, published was aa"),
        ({"version": 3, "digests": {"w": "aa", "derived": "x"}}, None),
        ({"version": 3}, None),
    ],
)
def test_weight_update_is_verified(answer: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    publish_version(tmp_path, 3)

    class Scripted(PrimeEngine):
        async def load(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            assert (path, body) == ("/update_weights", {"weight_dir": str(tmp_path / "weights" / "step_3")})
            return answer

    engine = Scripted("http://127.0.0.1:1")
    result = anyio.run(engine.update_weights_from_checkpoint, str(tmp_path / "weights" / "step_3"))
    assert result["success"] is (message is None) and (message is None or result["message"] == message)


class AnyEngine:
    """Accepts all weights and records them."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        self.loaded.append(Path(checkpoint_path).name)
        return {"success": True}


def make_pool(engines: list[AnyEngine], out: Path, version: int, name: str = "weights") -> ServerPool:
    servers: Any = engines
    return ServerPool([], servers, PolicyVersion(version), out / name)


def relay_until(
    out: Path,
    engine: AnyEngine,
    version: int,
    sent: int,
    wanted: int,
    publish: list[int],
    log_timeline: Callable[[str, float, float, int], None] = lambda *interval: None,
    is_received: Callable[[int], bool] = lambda step: True,
) -> list[int]:
    """Run a relay that starts at `version` until `wanted` is live; returns the versions it reported."""
    live: list[int] = []

    async def main() -> None:
        servers = make_pool([engine], out, version)
        servers.version.subscribe(lambda version: live.append(version.live))
        relay = WeightRelay(servers, is_received=is_received, timeout_s=60, log_timeline=log_timeline)
        for step in range(version + 1, sent + 1):
            relay.mark_sent(step)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(relay.run)
            with anyio.fail_after(20):
                for step in publish:
                    publish_version(out, step)
                await relay.wait_for_version(wanted)
            tasks.cancel_scope.cancel()

    anyio.run(main)
    return live


def test_relay_skips_superseded_versions(tmp_path: Path) -> None:
    engine = AnyEngine()
    assert relay_until(tmp_path, engine, version=0, sent=3, wanted=3, publish=[1, 2, 3])[-1] == 3
    assert engine.loaded[-1] == "step_3" and len(engine.loaded) == len(set(engine.loaded))


def test_relay_logs_engine_updates(tmp_path: Path) -> None:
    spans: list[tuple[str, int, bool]] = []

    def log(what: str, start: float, end: float, step: int) -> None:
        spans.append((what, step, 0 < start <= end))

    relay_until(tmp_path, AnyEngine(), version=0, sent=1, wanted=1, publish=[1], log_timeline=log)
    assert spans == [("update_weights", 1, True)]


def test_resumed_relay_ignores_old_versions(tmp_path: Path) -> None:
    publish_version(tmp_path, 9)
    engine = AnyEngine()
    assert relay_until(tmp_path, engine, version=4, sent=6, wanted=6, publish=[5, 6])[-1] == 6
    assert engine.loaded[-1] == "step_6" and "step_9" not in engine.loaded


def test_resumed_relay_waits_until_batches_are_read(tmp_path: Path) -> None:
    """Versions of the interrupted attempt are there until the trainer has resumed, too."""
    for step in (5, 6):
        publish_version(tmp_path, step)
    servers = make_pool([AnyEngine()], tmp_path, 4)
    received, run_dir = set[int](), RunDir(tmp_path)
    for process in ("trainer", "orchestrator"):
        run_dir.begin_attempt(process, 0)
    run_dir.begin_attempt("orchestrator", 4)
    relay = WeightRelay(
        servers,
        is_received=received.__contains__,
        timeout_s=0,
        log_timeline=lambda *interval: None,
    )
    servers.has_resumed = lambda: run_dir.has_resumed("trainer", 4, 0.0)
    for step in (5, 6):
        relay.mark_sent(step)
    assert relay._newest() is None
    with pytest.raises(TimeoutError, match=r"version 5 .*not read batch 5; .*restart it with --resume"):
        relay._check_timeout()
    run_dir.begin_attempt("trainer", 4)
    assert relay._newest() == 5  # of a trainer that had read the interrupted attempt's copy of the first batch
    received.add(6)
    assert relay._newest() == 6
    assert relay_until(tmp_path, AnyEngine(), 4, 6, 6, [], is_received=received.__contains__) == [6]


def test_ema_teacher_loads_every_version(tmp_path: Path) -> None:
    engine, teacher = AnyEngine(), AnyEngine()

    async def load(step: int) -> None:
        relay = WeightRelay(
            make_pool([engine], tmp_path, step - 1),
            is_received=lambda step: True,
            timeout_s=60,
            log_timeline=lambda *interval: None,
            ema_servers=make_pool([teacher], tmp_path, step - 1, "average"),
        )
        await relay.load(step)

    publish_version(tmp_path, 3)
    with pytest.raises(ValueError, match=r"average has no EMA weights .* set trainer\.ema_decay"):
        anyio.run(load, 3)
    publish_dir(tmp_path / "average" / "step_3", lambda path: None)
    anyio.run(load, 3)
    assert (engine.loaded[-1], teacher.loaded) == ("step_3", ["step_3"])


def test_a_hang_report_names_servers_that_load_weights() -> None:
    """Not the trainer, which has published them."""
    values: dict[str, Any] = {field.name: MagicMock() for field in fields(Orchestrator)}
    values |= {"version": PolicyVersion(), "ema_servers": None}
    orchestrator = Orchestrator(**values)
    values["servers"].is_below_minimum = False
    values["rollouts"].num_running, values["relay"].num_sent, values["relay"].waited_s = 0, 1, 400.0

    async def main() -> list[tuple[str, str | None]]:
        async with orchestrator.version.lock:
            states = [orchestrator.describe_wait()]
        return [(state.what, state.on) for state in (*states, orchestrator.describe_wait())]

    loading, waiting = anyio.run(main)
    assert loading == ("waits for inference servers to load weights", "inference")
    assert waiting == ("waits for version 1", "trainer")


def test_checkpoint_requires_both_halves(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    store = CheckpointStore(run, OrchestratorCkptConfig(interval=2, resume_step=-1, keep=2), max_steps=7)
    assert [step for step in range(1, 8) if store.is_due(step)] == [2, 4, 6, 7]
    assert store.load() == (0, None)
    for step in range(1, 7):
        store.save(step, lambda step=step: {"rollouts": {"n": step}})
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step_2", "step_4", "step_6"]
    assert store.load() == (0, None)
    publish_dir(run.checkpoints / "step_4" / "trainer", lambda path: None)
    assert store.load() == (4, {"schema": 1, "step": 4, "rollouts": {"n": 4}})
    with pytest.raises(ValueError, match=r"resume_step = 6: .*step_6 has no complete checkpoint .* complete: 4"):
        CheckpointStore(RunDir(tmp_path), OrchestratorCkptConfig(resume_step=6), 7).load()
    assert not CheckpointStore(run, None, 7).is_due(7)


def test_later_halves_stay_until_the_first_is_saved(tmp_path: Path) -> None:
    """Until then the trainer may refuse the named checkpoint, and the run continues from the latest."""
    run = RunDir(tmp_path)
    first = CheckpointStore(run, OrchestratorCkptConfig(interval=2), max_steps=None)
    for step in (2, 4, 6):
        first.save(step, lambda step=step: {"n": step})
        publish_dir(step_path(run.checkpoints, step) / "trainer", lambda path: None, sealed=True)
    store = CheckpointStore(run, OrchestratorCkptConfig(interval=2, resume_step=2, keep=1), max_steps=None)
    unfinished = run.checkpoints / "step_2" / ".tmp-orchestrator-abc"
    unfinished.mkdir()
    store.claim_batches(store.load()[0])
    assert complete_steps(run.checkpoints, CKPT_PARTS) == [2, 4, 6] and not unfinished.exists()
    store.save(3, dict)
    store.save(4, dict)
    assert complete_steps(run.checkpoints, CKPT_PARTS) == [2], "the trainer may still be loading it"
    store.save(6, dict)
    moved = run.attempts / "1" / "checkpoints" / "step_4" / "orchestrator" / "state.json"
    assert json.loads(moved.read_text())["n"] == 4 and sorted(run.attempts.iterdir()) == [run.attempts / "1"]
    assert complete_steps(run.checkpoints, ("orchestrator",)) == [2, 4, 6]


def test_resume_before_trainer_commit(tmp_path: Path) -> None:
    """The orchestrator's half of a checkpoint is published long before the trainer's, and prunes older ones."""
    store = CheckpointStore(RunDir(tmp_path), OrchestratorCkptConfig(interval=10, resume_step=-1, keep=1), max_steps=40)

    def commit(step: int) -> None:
        publish_dir(store.root / f"step_{step}" / "trainer", lambda path: None, sealed=True)

    store.save(10, lambda: {"rollouts": {}})
    commit(10)
    store.save(20, lambda: {"rollouts": {}})
    assert store.load()[0] == 10
    commit(20)
    assert store.load()[0] == 20
    store.save(30, lambda: {"rollouts": {}})
    assert store.load()[0] == 20 and sorted(p.name for p in store.root.iterdir()) == ["step_20", "step_30"]


def scored(group_index: int, index: int, reward: float, length: int = 3, versions: int = 0) -> Sample:
    return Sample(
        prompt="p",
        tokens=[1] * length,
        loss_mask=[0.0] + [1.0] * (length - 1),
        inference_logprobs=[0.0] * length,
        reward=reward,
        group_index=group_index,
        index=index,
        versions=[(1, versions)],
        metadata={"env": "e", "metrics": {"m": reward}},
    )


def test_advantages_per_rollout_on_trained_tokens() -> None:
    # rollout (0, 0) has two samples: its reward must count once
    samples = [scored(0, 0, 1.0), scored(0, 0, 1.0, 5), scored(0, 1, 0.0), scored(1, 0, 9.0), scored(1, 1, 3.0)]

    def assign_advantages(samples: list[Sample], advantage: AdvantageConfig | None) -> None:
        build_advantages(OrchestratorConfig(advantage=advantage))(samples)

    assign_advantages(samples, AdvantageConfig())
    assert [s.advantages for s in samples[:3]] == [[0, 0.5, 0.5], [0, 0.5, 0.5, 0.5, 0.5], [0, -0.5, -0.5]]
    assert [s.advantages[-1] for s in samples[3:]] == [3.0, -3.0]
    assign_advantages(samples, AdvantageConfig(length_weighted_mean=True))
    assert samples[0].advantages[-1] == pytest.approx(1 - 6 / 8)
    assign_advantages(samples, AdvantageConfig(std="group"))
    assert [s.advantages[-1] for s in samples[3:]] == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assign_advantages(samples, AdvantageConfig(std="batch"))
    assert [s.advantages[-1] for s in samples[2:]] == pytest.approx(
        [a / statistics.stdev([1, 0, 9, 3]) for a in (-0.5, 3, -3)]
    )
    assign_advantages(samples, None)
    assert [s.advantages[-1] for s in samples] == [1, 1, 0, 9, 3]


def test_environments_have_own_advantages_and_objectives() -> None:
    envs = [
        {"id": "a", "loss": {"type": "grpo"}, "advantage": {"std": "group"}},
        {"id": "b", "loss": {}},
        {"id": "c", "advantage": {"baseline": "none"}},
    ]
    config = OrchestratorConfig.model_validate({"env": envs})
    samples = [scored(group, i, float(i)) for group in range(4) for i in range(2)]
    for sample in samples:
        sample.metadata["env"] = "abcd"[sample.group_index or 0]
    build_advantages(config)(samples)
    assert [s.advantages[-1] for s in samples if s.advantages] == pytest.approx(
        [-(0.5**0.5), 0.5**0.5, -0.5, 0.5, 0.0, 1.0, -0.5, 0.5]
    )
    assert [s.objective for s in samples] == ["a", "a", "b", "b", None, None, None, None]


def test_maxrl_takes_linear_penalties_of_several_samples() -> None:
    """Each rollout has more sampled tokens than seq_len: the penalty is the mean reward, which rounding may exceed."""
    values = {"seq_len": 5, "advantage": {"std": "mean"}, "length_penalty": {"type": "linear", "coef": 1.0}}
    samples = [scored(0, index, reward, 5) for index, reward in ((0, 0.2), (0, 0.2), (1, 0.6), (1, 0.6))]
    build_advantages(OrchestratorConfig.model_validate(values))(samples)
    assert [sample.advantages for sample in samples] == [[0.0] * 5] * 4


@pytest.mark.parametrize("advantage", [{"std": "batch"}, {"std": "mean"}, {"rewards": {"m": 1.0}}], ids=str)
def test_references_are_left_out_of_advantages(advantage: dict[str, Any]) -> None:
    samples = [scored(0, 0, 1.0), scored(0, 1, 0.0)]
    references = [scored(1, i, -5.0 * i) for i in range(2)]
    for sample in references:
        sample.reference_weight, sample.metadata = 0.5, {"env": "r"}
    assign = build_advantages(OrchestratorConfig.model_validate({"advantage": advantage}))
    assign([*samples, *references])
    together = [sample.advantages for sample in samples]
    assign(samples)
    assert together == [sample.advantages for sample in samples] and any(samples[0].advantages or [])
    assert [sample.advantages for sample in references] == [[0.0] * 3] * 2


def test_zeroed_rollouts_have_zero_reward_components() -> None:
    advantage = AdvantageConfig(rewards={"m": 1.0})
    config = OrchestratorConfig(zero_truncated_completions=True, advantage=advantage)
    servers: Any = None
    generator = GroupGenerator(config, {}, servers)
    samples: list[Sample] = []
    for i, (reward, status) in enumerate([(1.0, Status.TRUNCATED), (0.0, Status.COMPLETED), (1.0, Status.COMPLETED)]):
        turns = [Turn(prompt_ids=[1], completion_ids=[2], logprobs=[-1.0])]
        rollout = Rollout(prompt="p", turns=turns, num_turns=1, reward=reward, metrics={"m": reward}, status=status)
        samples += generator._to_samples(rollout, "e", 0, i, 0)
    build_advantages(config)(samples)
    first, second, third = [s.advantages[-1] for s in samples if s.advantages]
    assert first == second < 0 < third
    assert samples[0].metadata["metrics"] == {"m": 1.0}, "recorded as scored"


def test_role_baselines_continue_in_a_resumed_run() -> None:
    config = OrchestratorConfig(advantage=AdvantageConfig(baseline="role", decay=0.5))
    baselines: dict[str, float] = {}
    first, second = [scored(0, 0, 1.0)], [scored(1, 0, 1.0)]
    build_advantages(config, baselines)(first)
    assert baselines == {"e/": 0.5}
    build_advantages(config, {"e/": 0.5})(second)
    assert [s.advantages[-1] for s in (*first, *second) if s.advantages] == [1.0, 0.5]


def test_a_reference_in_the_reward_is_not_sent_to_the_trainer() -> None:
    samples = [scored(0, 0, 1.0), scored(0, 1, 0.0)]
    for sample, reference in zip(samples, (-0.5, -1.0), strict=True):
        sample.teacher_logprobs = [0.0, reference, reference]
    config = OrchestratorConfig(advantage=AdvantageConfig(kl_coef=0.1))
    build_advantages(config)(samples)
    assert [s.advantages[-1] for s in samples if s.advantages] == pytest.approx([0.55, -0.55])
    assert all(sample.teacher_logprobs is None for sample in samples)


@pytest.mark.parametrize(
    ("advantage", "words"),
    [
        ({"rewards": {"m": 1.0}, "std": "group"}, "std has no effect with rewards"),
        ({"rewards": {"m": 1.0}, "kl_coef": 0.1}, "kl_coef has no effect with rewards"),
        ({"baseline": "role", "std": "batch"}, "set std to"),
        ({"decay": 0.5}, "decay has no effect without"),
    ],
)
def test_advantage_options_without_effect_are_rejected(advantage: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AdvantageConfig.model_validate(advantage)
    with pytest.raises(ValueError, match=r"length_penalty has no effect with advantage\.rewards"):
        OrchestratorConfig.model_validate({"advantage": {"rewards": {"m": 1.0}}, "length_penalty": {}})


def test_batch_metrics_in_closed_form() -> None:
    samples = [scored(0, 0, 1.0, 3, 4), scored(0, 1, 0.0, 5, 5), scored(1, 0, 0.0, 3, 3), scored(1, 1, 0.0, 3, 5)]
    kept = drop_overlong(samples, seq_len=4)
    assert kept == [samples[0], samples[2], samples[3]] and samples[1].status == Status.TRUNCATED
    metrics = compute_batch_metrics(samples, step=6, version=4, num_kept=3)
    expected = {
        "reward/mean": 0.25, "reward/min": 0.0, "reward/max": 1.0, "reward/std": 0.1875**0.5,
        "frac_reward_zero_std": 0.5, "batch/solve_none": 0.5, "batch/solve_all": 0.0, "batch/effective_batch_size": 0.5,
        "batch/async_level": 1, "batch/off_policy_level/max": 2, "batch/overlong": 0.25,
        "seq_len/max": 5, "prompt_len/mean": 1, "completion_len/min": 2, "is_truncated/mean": 0.25, "metrics/m": 0.25,
        "progress/problems": 2, "progress/samples": 4, "progress/tokens": 14, "reward/e": 0.25, "batch/e": 1,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == expected
    rounded = [scored(0, 0, 0.7 + 0.2 + 0.1), scored(1, 0, 0.3 - 0.1 - 0.2)]
    metrics = compute_batch_metrics(rounded, step=1, version=0, num_kept=2)
    assert metrics["batch/solve_none"] == metrics["batch/solve_all"] == 0.5


def test_failed_rewards_count_as_errors_if_the_rollout_failed() -> None:
    """In an environment of verifiers, a reward function that raises counts as 0, and the rollout is trained."""
    servers: Any = None
    generator = GroupGenerator(OrchestratorConfig(), {}, servers)
    for i, status in enumerate([Status.COMPLETED, Status.COMPLETED, Status.FAILED]):
        turns = [Turn(prompt_ids=[1], completion_ids=[2], logprobs=[-1.0])]
        broken = {"error": "bug: KeyError: 'x'", "error_type": "RewardError"} if i else {}
        generator._to_samples(Rollout(prompt="p", turns=turns, num_turns=1, status=status, **broken), "e", 0, i, 0)
    expected = {"error/mean": 1 / 3, "error/RewardError": 2.0}
    assert compute_error_metrics(*generator.take_errors(), num_rollouts=2) == expected
    assert compute_error_metrics(*generator.take_errors(), num_rollouts=2) == {"error/mean": 0.0}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_metrics_that_are_not_finite_are_left_out(value: float) -> None:
    samples = [scored(0, 0, 1.0), scored(0, 1, 0.0)]
    samples[1].metadata["metrics"] = {"m": value, "other": value}
    for batch in (samples, [Sample.from_dict(sample.to_dict()) for sample in samples]):
        metrics = compute_batch_metrics(batch, step=1, version=0, num_kept=2)
        assert metrics["metrics/m"] == 1.0 and "metrics/other" not in metrics
        with pytest.raises(ValueError, match="not finite: fix the reward function"):
            build_advantages(OrchestratorConfig(advantage=AdvantageConfig(rewards={"m": 1.0})))(batch)


def test_online_difficulty_filtering() -> None:
    judge = partial(anyio.run, build_group_filter(BufferConfig(online_difficulty_filtering=True)))
    assert judge([scored(0, 0, 1.0), scored(0, 1, 1.0)]) == "easy"
    assert judge([scored(0, 0, 0.0)]) == "hard"
    assert judge([scored(0, 0, 1.0), scored(0, 1, 0.0)]) is None
    assert judge([scored(0, i, 0.7 + 0.2 + 0.1) for i in range(2)]) == "easy", "1, rounded"
    reference = scored(0, 0, 1.0)
    reference.reference_weight = 1.0
    assert judge([reference]) is None, "its reward is ignored"
    assert judge([scored(0, i, 0.3 - 0.2 - 0.1) for i in range(2)]) == "hard", "0, rounded"


def test_invalid_configs_raise(environments: dict[str, Environment], engine: FakeEngine, tmp_path: Path) -> None:
    for values, message in (
        ({"batch_size": 10, "rollouts_per_example": 4}, "batch_size = 10 is not a multiple"),
        ({"env": [{"id": "a"}, {"id": "b", "name": "a"}]}, "two environments called 'a'"),
        ({"advantage": {"baseline": "none", "length_weighted_mean": True}}, "two baselines"),
        ({"eval": {"env": [{"id": "a"}, {"id": "b", "name": "a"}]}}, r"eval\n.*two environments named 'a'"),
        ({"eval": {"rollouts_per_example": 512}}, r"eval\n.*max_concurrent = 256 is less than the 512 rollouts"),
        ({"eval": {"env": [{"id": "a", "rollouts_per_example": 300}]}}, r"eval\n.*256 is less than the 300 rollouts"),
    ):
        with pytest.raises(ValueError, match=message):
            OrchestratorConfig.model_validate(values)
    with pytest.raises(ValueError, match="max_concurrent = 3 is smaller than one group"):
        run(make_config(engine, tmp_path, max_concurrent=3), environments)
