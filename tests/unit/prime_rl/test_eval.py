"""Evaluation: rollouts to metrics, schedules and steps."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from loguru import logger

from prime_rl.configuration.errors import ConfigError
from prime_rl.configuration.sections import GenerationEnvConfig, SamplingConfig
from prime_rl.eval import envs
from prime_rl.eval.config import EvalConfig
from prime_rl.eval.eval import EvalJob, build_job, evaluate, evaluate_environment, iter_endpoints, server_options
from prime_rl.eval.results import FILES, format_metrics, format_row, read_model, write_results
from prime_rl.generation import rollout_jobs
from prime_rl.generation.model_server import build_server_argv, start_server
from prime_rl.generation.resume_log import Result, to_result
from prime_rl.generation.session import GenerationRun
from prime_rl.runtime.machine import find_free_port
from prime_rl.runtime.run_dir import lock_file
from prime_rl.runtime.run_state import read_run_state
from prime_rl.utils.monitor import build_monitor
from prime_rl.utils.pydantic_config import parse_argv
from rollouts.agents import Turn
from rollouts.training.agent_integration import Rollout
from rollouts.training.environments import digest_code
from rollouts.training.metrics import load_jsonl
from rollouts.training.steps import publish_step
from rollouts.training.types import Status
from rollouts.training.weight_sync import HttpServer, WeightSyncError


def rollout(reward: float, length: int = 2, **fields: Any) -> Rollout:
    turn = Turn(prompt_ids=[1], completion_ids=[5] * length, logprobs=[-0.5] * length)
    return Rollout(prompt="p", turns=[turn], num_turns=1, reward=reward, **fields)


def failed() -> Rollout:
    return Rollout(prompt="p", status=Status.FAILED, error="boom", error_type="KeyError")


def summarize(groups: list[list[Rollout]], k: int, threshold: float = 1.0) -> dict[str, float]:
    results = [[to_result(rollout, number) for number, rollout in enumerate(group)] for group in groups]
    return envs.summarize(results, k, threshold)


def parse(*argv: str) -> EvalConfig:
    return parse_argv(EvalConfig, list(argv), "eval")[0]


class Client:
    base_url = "http://localhost:1/v1"


class Echo:
    """An environment whose reward is a function of the seed it is given; slower for earlier rows."""

    id = "echo"

    def __init__(self, num_rows: int = 4) -> None:
        self.num_rows = num_rows
        self.running = self.most = 0

    def rows(self, split: str = "train") -> list[dict[str, Any]]:
        return [{"prompt": f"{split} {i}", "example_id": i} for i in range(self.num_rows)]

    async def run_group(
        self, row: dict[str, Any], client: Any, model: str, sampling_args: Any, retries: int = 0
    ) -> list[Rollout]:
        self.running += len(sampling_args)
        self.most = max(self.most, self.running)
        await anyio.sleep(0.002 * (self.num_rows - row["example_id"]))
        self.running -= len(sampling_args)
        rewards = [random.Random(args["seed"]).random() for args in sampling_args]
        return [rollout(r, example_id=row["example_id"], metrics={"exact_match": float(r > 0.5)}) for r in rewards]


def test_summary_of_two_examples() -> None:
    groups = [[rollout(1.0, 2), rollout(0.0, 4)], [rollout(1.0, 6), rollout(1.0, 8)]]
    for r in groups[1]:
        r.metrics = {"exact_match": 1.0}
    for r in groups[0]:
        r.metrics = {"exact_match": 0.0}
    groups[0][1].status = Status.TRUNCATED
    summary = summarize(groups, 2)
    assert summary["avg@2"] == 0.75
    # Example means 0.5 and 1: s = 0.3536, divided by sqrt(2).
    assert summary["avg@2/stderr"] == pytest.approx(0.25)
    assert summary["pass@1"] == 0.75
    assert summary["pass@2"] == 1.0
    assert summary["metrics/exact_match"] == 0.5
    assert summary["completion_len/mean"] == 5.0
    assert summary["is_truncated/mean"] == 0.25
    assert summary["error/mean"] == 0.0
    assert (summary["examples"], summary["rollouts"]) == (2, 4)


def test_failed_rollouts_only_count_as_errors() -> None:
    summary = summarize([[rollout(1.0), failed()], [failed(), failed()], [rollout(0.0), rollout(1.0)]], 2)
    assert summary["avg@2"] == pytest.approx(0.75)
    assert summary["pass@1"] == pytest.approx(0.75)
    assert summary["pass@2"] == 1.0
    assert summary["error/mean"] == pytest.approx(0.5)
    assert (summary["examples"], summary["rollouts"]) == (3, 3)


def test_unscored_rollouts_are_counted_and_warned_of(tmp_path: Path) -> None:
    class Unscored(Echo):
        async def run_group(self, row: dict[str, Any], *args: Any, **options: Any) -> list[Rollout]:
            broken = {"error": "bug: KeyError: 'x'", "error_type": "RewardError"} if row["example_id"] else {}
            return [rollout(0.0, example_id=row["example_id"], **broken)]

    lines = list[str]()
    handler = logger.add(lines.append, format="{level} {message}")
    summary = run_echo(parse("--output_dir", str(tmp_path)), Unscored())
    logger.remove(handler)
    assert (summary["error/RewardError"], summary["error/mean"], summary["avg@1"]) == (3, 0.0, 0.0)
    assert format_row(summary)["reward errors"] == "3"
    warning = "WARNING reverse-text: reward functions failed in 3 of 4 rollouts, where they count as 0; "
    assert warning + "first error: RewardError: bug: KeyError: 'x'\n" in lines


def test_only_failures_give_nan() -> None:
    summary = summarize([[failed()]], 1)
    assert math.isnan(summary["avg@1"]) and math.isnan(summary["pass@1"])
    assert summary["error/mean"] == 1.0


def test_pass_at_k_threshold() -> None:
    groups = [[rollout(r) for r in (0.4, 0.6, 0.9, 1.0)]]
    summary = summarize(groups, 4, 0.9)
    assert summary["pass@1"] == 0.5
    assert summary["pass@2"] == pytest.approx(5 / 6)  # 1 - C(2, 2) / C(4, 2)
    assert summary["pass@4"] == 1.0
    assert summarize([[rollout(0.7 + 0.2 + 0.1)]], 1)["pass@1"] == 1.0, "a perfect rollout, rounded"
    assert envs.powers_of_two(6) == [1, 2, 4, 6]
    assert envs.powers_of_two(8) == [1, 2, 4, 8]


def test_results_keep_every_rollout() -> None:
    kept, lost = to_result(rollout(0.5, 3, example_id=7), 0), to_result(failed(), 1)
    assert (kept.example_id, kept.rollout_idx, lost.rollout_idx) == (7, 0, 1)
    assert kept.reward == 0.5 and kept.completion_len == 3 and kept.error is None
    assert lost.reward is None and lost.error == "KeyError: boom"


def test_lengths_from_tokens_or_usage() -> None:
    by_usage = Rollout(prompt="p", reward=1.0, completion_tokens=40, stop_reason="length")
    summary = summarize([[rollout(1.0, 20)], [by_usage], [Rollout(prompt="p", reward=1.0)]], 1)
    assert summary["completion_len/mean"] == 30.0
    assert summary["stop/length"] == pytest.approx(1 / 3) and summary["stop/unknown"] == pytest.approx(2 / 3)


def rewards(config: EvalConfig, num_rows: int = 4) -> list[list[float]]:
    target = rollout_jobs.ModelEndpoint([Client()], "m")
    groups = anyio.run(rollout_jobs.run_environment, Echo(num_rows), config.env[0], config, target)
    return [[r.reward for r in group] for group in groups]


def test_completions_depend_only_on_seed() -> None:
    config = parse("--rollouts_per_example", "3")
    one_by_one = parse("--rollouts_per_example", "3", "--max_concurrent", "3", "--num_examples", "2")
    assert rewards(config)[:2] == rewards(one_by_one)
    assert rewards(config) != rewards(parse("--rollouts_per_example", "3", "--seed", "1"))
    everything = [reward for group in rewards(config) for reward in group]
    assert len(set(everything)) == len(everything)


def test_examples_come_from_the_evaluation_split_in_order() -> None:
    config = parse("--num_examples", "3")
    target = rollout_jobs.ModelEndpoint([Client()], "m")
    groups = anyio.run(rollout_jobs.run_environment, Echo(), config.env[0], config, target)
    assert [group[0].example_id for group in groups] == [0, 1, 2]


def test_max_concurrent_bounds_the_rollouts_in_flight() -> None:
    environment, config = Echo(8), parse("--rollouts_per_example", "2", "--max_concurrent", "4")
    anyio.run(
        rollout_jobs.run_environment, environment, config.env[0], config, rollout_jobs.ModelEndpoint([Client()], "m")
    )
    assert environment.most == 4
    with pytest.raises(ConfigError, match="max_concurrent"):
        parse("--rollouts_per_example", "5", "--max_concurrent", "4")


def test_finished_rollouts_are_not_kept_in_memory(tmp_path: Path) -> None:
    class Group(list[Rollout]):
        """A list that may be referenced weakly."""

    class Watching(Echo):
        def __init__(self) -> None:
            super().__init__(8)
            self.made: list[weakref.ref[Group]] = []
            self.most_kept = 0

        async def run_group(self, *args: Any, **options: Any) -> list[Rollout]:
            self.most_kept = max(self.most_kept, sum(group() is not None for group in self.made))
            group = Group(await super().run_group(*args, **options))
            self.made.append(weakref.ref(group))
            return group

    environment = Watching()
    assert run_echo(parse("--max_concurrent", "1", "--output_dir", str(tmp_path)), environment)["rollouts"] == 8
    assert environment.most_kept <= 1


def test_environment_metrics() -> None:
    env = GenerationEnvConfig(id="echo", num_examples=1, rollouts_per_example=3)
    config = EvalConfig(env=[env], num_examples=4, rollouts_per_example=2)
    assert [len(group) for group in rewards(config)] == [3]


def run_echo(config: EvalConfig, environment: Echo, version: int = 20, *, remove: bool = True) -> dict[str, float]:
    """One environment's evaluation, as the command makes it; `remove`: it was the last."""
    target = rollout_jobs.ModelEndpoint([Client()], "m", version=version)
    monitor = build_monitor(config.output_dir, "eval")
    run = GenerationRun(config, {"reverse-text": environment}, monitor)
    try:
        return anyio.run(evaluate_environment, run, config, config.env[0], environment, target)
    finally:
        run.close_resume_logs(remove=remove)


def test_results_summary_and_metrics_are_written(tmp_path: Path) -> None:
    config = parse("--rollouts_per_example", "2", "--output_dir", str(tmp_path), "--model.name", "some/model")
    for _ in range(2):
        summary = run_echo(config, Echo())
    folder = tmp_path / "evals" / "reverse-text"
    lines = list(load_jsonl(folder / "results.jsonl"))
    assert len(lines) == 8 and "tools" not in lines[0]
    written = json.loads((folder / "summary.json").read_text())
    assert written["avg@2"] == summary["avg@2"] and written["model"] == "some/model" and written["step"] == 20
    rows = list(load_jsonl(tmp_path / "metrics.jsonl"))
    assert [(row["step"], row["process"]) for row in rows] == [(20, "eval")] * 2
    assert rows[0]["eval/reverse-text/avg@2"] == summary["avg@2"]
    assert rows[0]["eval/reverse-text/metrics/exact_match"] == summary["metrics/exact_match"]
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_results_of_another_model_are_kept(tmp_path: Path) -> None:
    for name in ("first", "first", "second"):
        run_echo(parse("--output_dir", str(tmp_path), "--model.name", name), Echo())
    [folder] = (tmp_path / "attempts").iterdir()
    kept, new = (place / "evals" / "reverse-text" for place in (folder, tmp_path))
    assert read_model(kept) == "first" and read_model(new) == "second"
    assert {path.name for path in kept.iterdir()} == {path.name for path in new.iterdir()} == set(FILES)


def test_parquet_has_same_rows(tmp_path: Path) -> None:
    from pyarrow import parquet

    run_echo(parse("--output_dir", str(tmp_path)), Echo())
    folder = tmp_path / "evals" / "reverse-text"
    lines, columns = list(load_jsonl(folder / "results.jsonl")), parquet.read_table(folder / "results.parquet")
    assert columns.column("reward").to_pylist() == [line["reward"] for line in lines]
    assert columns.column("prompt").to_pylist() == [line["prompt"] for line in lines]
    assert columns.column("metrics/exact_match").to_pylist() == [line["metrics"]["exact_match"] for line in lines]


def test_parquet_has_fields_that_the_first_row_lacks(tmp_path: Path) -> None:
    from pyarrow import parquet

    results = [[Result(reward=1.0), Result(reward=0.0, feedback="wrong", tools=[{"type": "function"}])]]
    config, endpoint = parse("--output_dir", str(tmp_path)), rollout_jobs.ModelEndpoint([], "m")
    write_results(tmp_path / "e", results, {}, config, endpoint)
    columns = parquet.read_table(tmp_path / "e" / "results.parquet")
    assert columns.column("feedback").to_pylist() == [None, "wrong"]
    assert columns.column("tools").to_pylist() == [None, '[{"type":"function"}]']


class Killed(BaseException):
    """Ends a run in the middle."""


class Counting(Echo):
    """Records the requested rollouts; crashes after some groups, and fails some rollouts."""

    scores_groups = False

    def __init__(self, num_rows: int = 6, dies_after: int | None = None, fails: str = "") -> None:
        super().__init__(num_rows)
        self.requested: list[tuple[int, int]] = []
        self.dies_after, self.fails = dies_after, fails

    async def run_group(
        self, row: dict[str, Any], client: Any, model: str, sampling_args: Any, retries: int = 0
    ) -> Any:
        if self.dies_after is not None and len(self.requested) >= self.dies_after:
            raise Killed
        self.requested += [(row["example_id"], args["seed"]) for args in sampling_args]
        made = await super().run_group(row, client, model, sampling_args, retries)
        if self.fails and row["example_id"] == 1:
            made[0] = Rollout(prompt=row["prompt"], status=Status.FAILED, error="gone", error_type=self.fails)
        return made


def test_interrupted_evaluation_resumes(tmp_path: Path) -> None:
    config = parse("--rollouts_per_example", "2", "--max_concurrent", "2", "--output_dir", str(tmp_path / "a"))
    first, second = Counting(dies_after=6), Counting()
    with pytest.raises(BaseExceptionGroup) as caught:
        run_echo(config, first, remove=False)
    assert caught.group_contains(Killed)
    whole = parse("--rollouts_per_example", "2", "--output_dir", str(tmp_path / "b"))
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(str(message)), format="{message}")
    try:
        summary = run_echo(config, second)
        assert sum("6 of 12 rollouts are finished" in line for line in lines) == 1
        assert {**run_echo(whole, Counting()), "time": 0} == {**summary, "time": 0}
    finally:
        logger.remove(handler)
    assert sum("rollouts are finished" in line for line in lines) == 1, "the second one started from the beginning"
    assert len(first.requested) == 6 and len(second.requested) == 6
    assert not set(first.requested) & set(second.requested)
    results = [(tmp_path / name / "evals" / "reverse-text" / "results.jsonl").read_text() for name in "ab"]
    assert results[0] == results[1]


def test_truncated_line_costs_one_group(tmp_path: Path) -> None:
    config = parse("--rollouts_per_example", "2", "--output_dir", str(tmp_path))
    with pytest.raises(BaseExceptionGroup):
        run_echo(
            parse("--rollouts_per_example", "2", "--max_concurrent", "2", "--output_dir", str(tmp_path)),
            Counting(dies_after=8),
            remove=False,
        )
    [resume_log] = (tmp_path / "evals" / "reverse-text").glob(".unfinished-*")
    resume_log.write_bytes(resume_log.read_bytes()[:-7])
    second = Counting()
    assert run_echo(config, second)["rollouts"] == 12
    assert len(second.requested) == 6  # two groups that were never started, and the truncated one


@pytest.mark.parametrize(
    "change",
    [
        ["--seed", "1"],
        ["--sampling.temperature", "0.5"],
        ["--env.0.args", "n=1"],
        ["--env.0.command", "python", "agent.py"],
        ["--no-resume"],
    ],
)
def test_changed_settings_reuse_nothing(tmp_path: Path, change: list[str]) -> None:
    options = ["--rollouts_per_example", "2", "--output_dir", str(tmp_path)]
    run_echo(parse(*options), Counting(), remove=False)
    again = Counting()
    run_echo(parse(*options, *change), again)
    assert len(again.requested) == 12


def test_changed_environment_code_reuses_nothing(tmp_path: Path) -> None:
    code = tmp_path / "edited.py"
    code.write_text("def load_environment(): return 1\n")
    config = parse("--env.0.id", str(code), "--env.0.name", "reverse-text", "--output_dir", str(tmp_path))
    run_echo(config, Counting(), remove=False)
    [kept] = (tmp_path / "evals" / "reverse-text").glob(".unfinished-*")
    code.write_text("def load_environment(): return 2\n")
    digest_code.cache_clear()  # of the process before
    again, lines = Counting(), list[str]()
    handler = logger.add(lines.append, format="{message}")
    run_echo(config, again)
    logger.remove(handler)
    assert again.requested and kept.exists()
    assert sum(f"The rollouts in {kept} are of other settings or other code" in line for line in lines) == 1


def test_a_changed_chat_template_reuses_nothing(tmp_path: Path) -> None:
    template = tmp_path / "model" / "chat_template.jinja"
    template.parent.mkdir()
    config = parse("--model.name", str(template.parent), "--output_dir", str(tmp_path))
    for text, num_requested in (("{{ a }}", 6), ("{{ a }}", 0), ("{{ a }}{{ b }}", 6)):
        if not (template.exists() and template.read_text() == text):
            template.write_text(text)
        environment = Counting()
        run_echo(config, environment, remove=False)
        assert len(environment.requested) == num_requested


@pytest.mark.parametrize("kind", ["ConnectionError", "APITimeoutError", "RolloutTimeout", "OverlongPrompt"])
def test_failures_are_retried_by_the_same_command(tmp_path: Path, kind: str) -> None:
    """Also after a longer timeout: a rollout that finishes within it does not depend on it."""
    options = ["--rollouts_per_example", "2", "--output_dir", str(tmp_path)]
    failing = Counting(fails=kind)
    assert run_echo(parse(*options, "--env.0.timeout", "1"), failing, remove=False)["error/mean"] == pytest.approx(
        1 / 12
    )
    again = Counting()
    assert run_echo(parse(*options, "--env.0.timeout", "60"), again)["error/mean"] == 0
    assert len(again.requested) == 1


def test_rollouts_that_are_compared_are_retried_together(tmp_path: Path) -> None:
    options = ["--rollouts_per_example", "2", "--output_dir", str(tmp_path)]
    run_echo(parse(*options), Counting(fails="ConnectionError"), remove=False)
    again = Counting()
    again.scores_groups = True
    run_echo(parse(*options), again)
    assert [row for row, _ in again.requested] == [1, 1]


@pytest.mark.parametrize(("kind", "num_failed"), [("RolloutTimeout", 1), ("OverlongPrompt", 0)])
def test_timeouts_keep_the_resume_log(tmp_path: Path, kind: str, num_failed: int) -> None:
    config = parse("--output_dir", str(tmp_path))
    run = GenerationRun(config, {}, build_monitor(tmp_path, "eval"))
    run.report_failures("echo", [[Result(reward=1.0)], [Result(error=f"{kind}: gone")]])
    assert run.num_failed == num_failed


def test_a_file_system_without_locks_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prime_rl.generation.resume_log import ResumeLog

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    ResumeLog(tmp_path, {"seed": 0}).close()


def test_the_resume_log_is_locked_in_one_way_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NFS `flock` and `lockf` are the same lock, and the process would wait for itself."""
    from prime_rl.generation.resume_log import ResumeLog

    locked, num_checked = set[int](), 0

    def flock(file: Any, _: int) -> None:
        locked.add(os.stat(file if isinstance(file, int) else file.fileno()).st_ino)

    def lockf(fd: int, _: int) -> None:
        nonlocal num_checked
        num_checked += 1
        assert os.stat(fd).st_ino not in locked

    monkeypatch.setattr("fcntl.flock", flock)
    monkeypatch.setattr("fcntl.lockf", lockf)
    resume_log = ResumeLog(tmp_path, {"seed": 0})
    resume_log.add(0, "row", [Result(reward=0.5)], 1.5)
    resume_log.close()
    assert locked and num_checked == 1


def test_resume_log_is_exclusive(tmp_path: Path) -> None:
    from prime_rl.generation.resume_log import ResumeLog

    resume_log = ResumeLog(tmp_path, {"seed": 0})
    with pytest.raises(ValueError, match="is being written"):
        ResumeLog(tmp_path, {"seed": 0})
    ResumeLog(tmp_path, {"seed": 1}).close()
    resume_log.close()
    ResumeLog(tmp_path, {"seed": 0}).close()
    assert list(tmp_path.iterdir()) == []  # nothing was in them


@pytest.mark.parametrize("remove", [True, False])
def test_a_series_holds_no_locks_of_reported_steps(tmp_path: Path, remove: bool) -> None:
    """A long one would exceed the limit of open files."""
    config = parse("--output_dir", str(tmp_path))
    environment = Counting()
    run = GenerationRun(config, {"reverse-text": environment}, build_monitor(tmp_path, "eval"))
    for version in (0, 1):
        target = rollout_jobs.ModelEndpoint([Client()], "m", version=version)
        anyio.run(evaluate_environment, run, config, config.env[0], environment, target)
    for resume_log in run.resume_logs:
        assert resume_log.results(0, 1) == []
        with lock_file(resume_log._lock_path, "is locked"):
            pass
    run.close_resume_logs(remove=remove)
    assert len([*tmp_path.rglob(".unfinished-*")]) == len([*tmp_path.rglob(".lock-*")]) == (0 if remove else 2)
    again = Counting()
    run_echo(config, again, version=1)
    assert len(again.requested) == (6 if remove else 0)


def test_results_belong_to_a_row_with_the_same_data(tmp_path: Path) -> None:
    from prime_rl.generation.resume_log import ResumeLog
    from rollouts.training.row_digests import compute_digest

    row = {"prompt": "Play.", "info": {"level": "A"}}
    resume_log = ResumeLog(tmp_path, {})
    resume_log.add(0, compute_digest(row), [Result(reward=0.5)], 1.5)
    assert resume_log.missing(0, compute_digest(dict(row)), 1) == []
    assert resume_log.missing(0, compute_digest({**row, "info": {"level": "B"}}), 1) == [0]
    resume_log.close()


def test_digests_of_any_row_are_stable() -> None:
    from rollouts.training.row_digests import compute_digest

    def build(text: str = "x") -> dict[str, Any]:
        info = {"board": {0: text, "0": 1, None: 2}, "seen": {1, "a", (2, 3)}, "state": object(), "path": Path(text)}
        return {"prompt": "\ud800", "info": info}

    assert compute_digest(build()) == compute_digest(build()) != compute_digest(build("y"))


def test_rows_that_rewards_change_in_place_resume(tmp_path: Path) -> None:
    class Marking(Counting):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.kept = [{**row, "info": {}} for row in super().rows()]

        def rows(self, split: str = "train") -> list[dict[str, Any]]:
            return self.kept

        async def run_group(self, row: dict[str, Any], *args: Any, **options: Any) -> Any:
            row["info"]["moves"] = {0: "left"}
            return await super().run_group(row, *args, **options)

    config = parse("--rollouts_per_example", "2", "--max_concurrent", "2", "--output_dir", str(tmp_path))
    first, second = Marking(dies_after=6), Marking()
    with pytest.raises(BaseExceptionGroup):
        run_echo(config, first, remove=False)
    run_echo(config, second)
    assert len(first.requested) == len(second.requested) == 6


def test_metrics_that_are_not_finite_are_left_out_of_means() -> None:
    for value in (math.nan, math.inf, None):
        found = [Result(reward=1.0, metrics={"m": 0.5}), Result(reward=1.0, metrics={"m": value, "other": value})]
        summary = envs.summarize([found], 2, 1.0)
        assert summary["metrics/m"] == 0.5 and math.isnan(summary["metrics/other"])


def test_nonfinite_numbers_survive_resume_log(tmp_path: Path) -> None:
    from prime_rl.generation.resume_log import ResumeLog

    resume_log = ResumeLog(tmp_path, {})
    resume_log.add(0, "row", [Result(reward=0.5, metrics={"ratio": math.nan})], 1.5)
    resume_log.close()
    found = ResumeLog(tmp_path, {})
    assert found.missing(0, "row", 2) == [1] and found.elapsed == 1.5
    [result] = found.results(0, 2)
    assert result.reward == 0.5 and result.metrics == {"ratio": None}
    found.close()


def test_table_row() -> None:
    summary = {**summarize([[rollout(1.0)], [rollout(0.5)]], 1), "time": 1.0}
    row = format_row(summary)
    assert row["avg@k"].startswith("0.7500 (") and row["k"] == "1" and "pass@1" not in row
    assert row["pass@k"].startswith("0.5000 (")
    assert row["truncated"] == "0.0%"
    assert format_metrics({"metrics/a": 0.5, "metrics/num_turns": 1.0}) == {"a": "0.5000"}


def test_strict_servers_get_no_unknown_fields() -> None:
    ours = rollout_jobs.build_request(SamplingConfig(), 2**40, "http://localhost:8000/v1", "gpt-4.1-mini")
    assert ours["extra_body"]["return_token_ids"] is True and ours["seed"] == 2**40
    strict = rollout_jobs.build_request(SamplingConfig(), 2**40, "https://api.openai.com/v1", "m")
    assert strict["extra_body"] == {} and "logprobs" not in strict and 0 <= strict["seed"] < 2**31


def test_reasoning_models_get_no_default_temperature() -> None:
    """They reject `temperature` and `top_p` even if they are 1."""
    url, names = "https://api.openai.com/v1", ("temperature", "top_p")
    default = rollout_jobs.build_request(SamplingConfig(), 0, url, "o4-mini")
    assert not [name for name in names if name in default]
    given = rollout_jobs.build_request(SamplingConfig(temperature=0, top_p=0.9), 0, url, "gpt-4.1-mini")
    assert [given[name] for name in names] == [0, 0.9]
    ours = rollout_jobs.build_request(SamplingConfig(), 0, "http://localhost:8000/v1", "m")
    assert [ours[name] for name in names] == [1, 1], "other servers may have defaults of their own"


def test_requests_without_tokens_have_the_set_fields_only() -> None:
    """Servers of other providers reject fields that they do not know."""

    def build(**keys: Any) -> dict[str, Any]:
        sampling = SamplingConfig(max_tokens=9, **keys)
        return rollout_jobs.build_request(sampling, 2**40, "http://far/v1", "m", with_tokens=False)

    neutral = {"temperature": 1, "top_p": 1, "max_tokens": 9, "seed": 2**40, "extra_body": {}}
    assert build() == neutral
    assert build(top_k=5, extra_body={"user": "me"}) == neutral | {"extra_body": {"top_k": 5, "user": "me"}}


def test_openai_base_url_keeps_fields_of_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    url, sampling = "http://localhost:8000/v1", SamplingConfig(top_k=5, min_p=0.1)
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    ours = rollout_jobs.build_request(sampling, 2**40, url, "outputs/weights/step_1")
    assert ours["extra_body"]["top_k"] == 5 and ours["logprobs"] is True and ours["seed"] == 2**40
    proxied = rollout_jobs.build_request(sampling, 2**40, url, "gpt-4.1-mini")
    assert proxied["extra_body"] == {}, "a proxy of the OpenAI API"


def test_server_selection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert build_job(parse("--model.name", "tiny-qwen3")) == EvalJob("tiny-qwen3")
    url = "http://localhost:1/v1"
    assert build_job(parse("--model.name", "x", "--client.base-url", url)) == EvalJob("x", (url,))
    with pytest.raises(ValueError, match="OPENAI_API_KEY"):
        build_job(parse())
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert build_job(parse()) == EvalJob("gpt-4.1-mini", ("https://api.openai.com/v1",))
    for name in ("outputs/rl/weights/step_2O", "tiny-qwen", str(tmp_path)):
        with pytest.raises(ValueError, match=r"model\.name"):
            build_job(parse("--model.name", name))


def test_series_of_steps(tmp_path: Path) -> None:
    for step in (5, 10):
        publish_step(tmp_path, step, lambda directory: (directory / "config.json").write_text("{}") and None)
    plan = build_job(parse("--weights-dir", str(tmp_path)))
    assert plan == EvalJob(str(tmp_path / "step_10"), (), (5, 10)), "its server loads what is removed last"
    config = parse("--weights-dir", str(tmp_path), "--steps", "10")
    assert build_job(config).steps == (10,)
    argv = build_server_argv(config, server_options(config, plan))
    assert argv[argv.index("--weight_dirs") + 1] == json.dumps([str(tmp_path)])
    with pytest.raises(ValueError, match=r"weights_dir .* step_7; available: 5, 10 .*ckpt\.interval"):
        build_job(parse("--weights-dir", str(tmp_path), "--steps", "5,7"))
    with pytest.raises(ConfigError, match="weights_dir"):
        parse("--steps", "5")


@pytest.mark.parametrize(("options", "limit"), [([], 1200), (["--client.timeout", "5"], 300)])
def test_loading_a_step_may_take_as_long_as_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], limit: float
) -> None:
    async def list_models(client: Any) -> list[str]:
        return []

    async def load(engines: list[HttpServer], path: str) -> None:
        assert [engine.timeout for engine in engines] == [limit]

    monkeypatch.setattr("prime_rl.generation.model_server.list_models", list_models)
    monkeypatch.setattr("rollouts.training.weight_sync.sync_weights_to_engines", load)
    config = parse("--weights-dir", str(tmp_path), *options)

    async def steps() -> list[int]:
        client = SimpleNamespace(headers={})
        job = EvalJob(str(tmp_path / "step_5"), (), (5,))
        return [found.version async for found in iter_endpoints(config, job, ["http://localhost:9/v1"], [client])]

    assert anyio.run(steps) == [5]


@pytest.mark.parametrize("options", [[], ["--steps", "5,6,7"]])
def test_steps_that_a_run_has_removed_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    async def list_models(client: Any) -> list[str]:
        return []

    async def load(engines: list[HttpServer], path: str) -> None:
        if not Path(path).exists():
            raise WeightSyncError(path, [("http://localhost:9", "does not exist")])

    monkeypatch.setattr("prime_rl.generation.model_server.list_models", list_models)
    monkeypatch.setattr("rollouts.training.weight_sync.sync_weights_to_engines", load)
    for step in (5, 7):
        publish_step(tmp_path, step, lambda directory: None)
    config = parse("--weights-dir", str(tmp_path), *options)

    async def steps() -> list[int]:
        client = SimpleNamespace(headers={})
        job = EvalJob(str(tmp_path / "step_5"), (), (5, 6, 7))
        return [found.version async for found in iter_endpoints(config, job, ["http://localhost:9/v1"], [client])]

    with pytest.raises(WeightSyncError, match="step_6") if options else nullcontext():
        assert anyio.run(steps) == [5, 7]


def test_its_own_server_reads_no_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    class Supervisor:
        def __init__(self, logs: Path, *, handle_signals: bool) -> None: ...

        def __enter__(self) -> Supervisor:
            return self

        def __exit__(self, *_: object) -> None: ...

        def start(self, name: str, argv: list[str], *, env: dict[str, str]) -> None:
            seen.update(os.environ)

    monkeypatch.setattr("prime_rl.runtime.process.Supervisor", Supervisor)
    monkeypatch.setenv("PRIME_OUTPUT_DIR", "outputs/rl")  # overridden by the option
    monkeypatch.setenv("PRIME_PARALLEL__TP", "2")  # no key of eval
    monkeypatch.setenv("PRIME_API_KEY", "secret")
    with start_server(parse("--model.name", "tiny-qwen3", "--output-dir", str(tmp_path)), "eval", {}):
        pass
    assert [name for name in seen if name.startswith("PRIME_")] == ["PRIME_API_KEY"]
    assert os.environ["PRIME_PARALLEL__TP"] == "2"


def test_dtype_and_exactness_of_its_own_server() -> None:
    config = parse("--model.name", "tiny-qwen3", "--model.dtype", "bfloat16", "--model.exact", "false")
    argv = build_server_argv(config, {})
    assert [argv[argv.index(key) + 1] for key in ("--model.dtype", "--exact")] == ["bfloat16", "false"]
    argv = build_server_argv(parse("--model.name", "tiny-qwen3"), {})
    assert "--model.dtype" not in argv and "--exact" not in argv
    with pytest.raises(ConfigError, match=r"model\.dtype = 'bfloat16' is for a model served by this command"):
        parse("--client.base-url", "http://127.0.0.1:9/v1", "--model.dtype", "bfloat16")


def test_missing_server_raises_before_loading_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_rl.utils.vf.open_environments", lambda *_: pytest.fail("must not be loaded"))
    client = {"base_url": [f"http://127.0.0.1:{find_free_port()}/v1"]}
    config = EvalConfig.model_validate({"client": client, "env": [{"id": "reverse-text"}], "output_dir": tmp_path})
    with pytest.raises(ConnectionError, match=r"client.base_url .* does not respond.*reconnect-timeout"):
        evaluate(config)
    state = read_run_state(tmp_path)
    assert state is not None and (state.command, state.status) == ("eval", "failed")


def test_options_of_its_own_server_warn_with_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_rl.utils.vf.open_environments", lambda *_: pytest.fail("must not be loaded"))
    url = f"http://127.0.0.1:{find_free_port()}/v1"
    argv = ["--client.base-url", url, "--model.max-model-len", "2048", "--model.debug.random-init", "true"]
    with pytest.raises(ConnectionError):
        evaluate(parse(*argv, "--output-dir", str(tmp_path)))
    log = (tmp_path / "logs" / "eval.log").read_text()
    assert f"model.max_model_len has no effect: it is for a model served by this command, not by {url}" in log
    assert "model.debug.random_init has no effect" in log


def test_dropped_sampling_keys_warn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{find_free_port()}/v1"
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    for name, argv in (("proxy", []), ("own", ["--client.base-url", url, "--model.name", "m"])):
        with pytest.raises(ConnectionError):
            evaluate(parse(*argv, "--sampling.top-k", "20", "--output-dir", str(tmp_path / name)))
    logs = [(tmp_path / name / "logs" / "eval.log").read_text() for name in ("proxy", "own")]
    assert "sampling.top_k has no effect" in logs[0] and "sampling.min_p" not in logs[0]
    assert "sampling.top_k" not in logs[1]
