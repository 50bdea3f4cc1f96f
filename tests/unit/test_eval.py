"""From rollouts to numbers, and the decisions around them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import anyio
import pytest

from prime_rl.eval import envs
from prime_rl.eval.config import EvalConfig, EvalEnvConfig
from prime_rl.eval.eval import Plan, build_server_argv, evaluate_environment, format_row, make_plan
from prime_rl.utils.config import SamplingConfig
from prime_rl.utils.pydantic_config import ConfigError, parse_argv
from rollouts.training.agent_integration import Rollout, Turn
from rollouts.training.metrics import load_jsonl
from rollouts.training.steps import publish_step
from rollouts.training.types import Status


def rollout(reward: float, length: int = 2, **fields: Any) -> Rollout:
    turn = Turn(prompt_ids=[1], completion_ids=[5] * length, logprobs=[-0.5] * length)
    return Rollout(prompt="p", turns=[turn], num_turns=1, reward=reward, **fields)


def failed() -> Rollout:
    return Rollout(prompt="p", status=Status.FAILED, error="boom", error_type="KeyError")


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


def test_the_numbers_of_two_examples() -> None:
    groups = [[rollout(1.0, 2), rollout(0.0, 4)], [rollout(1.0, 6), rollout(1.0, 8)]]
    for r in groups[1]:
        r.metrics = {"exact_match": 1.0}
    for r in groups[0]:
        r.metrics = {"exact_match": 0.0}
    groups[0][1].status = Status.TRUNCATED
    summary = envs.summarize(groups, 2, pass_threshold=1.0)
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


def test_failed_rollouts_are_counted_and_in_no_average() -> None:
    summary = envs.summarize([[rollout(1.0), failed()], [failed(), failed()], [rollout(0.0), rollout(1.0)]], 2, 1.0)
    assert summary["avg@2"] == pytest.approx(0.75)
    assert summary["pass@1"] == pytest.approx(0.75)
    assert summary["pass@2"] == 1.0
    assert summary["error/mean"] == pytest.approx(0.5)
    assert (summary["examples"], summary["rollouts"]) == (3, 3)


def test_nothing_but_failures_is_nan_and_not_zero() -> None:
    summary = envs.summarize([[failed()]], 1, 1.0)
    assert math.isnan(summary["avg@1"]) and math.isnan(summary["pass@1"])
    assert summary["error/mean"] == 1.0


def test_pass_at_k_counts_what_reaches_the_threshold() -> None:
    groups = [[rollout(r) for r in (0.4, 0.6, 0.9, 1.0)]]
    summary = envs.summarize(groups, 4, pass_threshold=0.9)
    assert summary["pass@1"] == 0.5
    assert summary["pass@2"] == pytest.approx(5 / 6)  # 1 - C(2, 2) / C(4, 2)
    assert summary["pass@4"] == 1.0
    assert envs.powers_of_two(6) == [1, 2, 4, 6]
    assert envs.powers_of_two(8) == [1, 2, 4, 8]


def test_results_keep_every_rollout() -> None:
    rows = envs.result_rows([[rollout(0.5, 3, example_id=7), failed()]])
    assert [(row["example_id"], row["rollout_idx"]) for row in rows] == [(7, 0), (0, 1)]
    assert rows[0]["reward"] == 0.5 and rows[0]["completion_len"] == 3 and rows[0]["error"] is None
    assert rows[1]["reward"] is None and rows[1]["error"] == "KeyError: boom"


def rewards(config: EvalConfig, num_rows: int = 4) -> list[list[float]]:
    target = envs.Target([Client()], "m")
    groups = anyio.run(envs.run_environment, Echo(num_rows), config.env[0], config, target)
    return [[r.reward for r in group] for group in groups]


def test_same_seed_same_completions_whatever_runs_beside_them() -> None:
    config = parse("--rollouts_per_example", "3")
    one_by_one = parse("--rollouts_per_example", "3", "--max_concurrent", "3", "--num_examples", "2")
    assert rewards(config)[:2] == rewards(one_by_one)
    assert rewards(config) != rewards(parse("--rollouts_per_example", "3", "--seed", "1"))
    everything = [reward for group in rewards(config) for reward in group]
    assert len(set(everything)) == len(everything)


def test_examples_come_from_the_evaluation_split_in_order() -> None:
    config = parse("--num_examples", "3")
    target = envs.Target([Client()], "m")
    groups = anyio.run(envs.run_environment, Echo(), config.env[0], config, target)
    assert [group[0].example_id for group in groups] == [0, 1, 2]


def test_max_concurrent_bounds_the_rollouts_in_flight() -> None:
    environment, config = Echo(8), parse("--rollouts_per_example", "2", "--max_concurrent", "4")
    anyio.run(envs.run_environment, environment, config.env[0], config, envs.Target([Client()], "m"))
    assert environment.most == 4
    with pytest.raises(ConfigError, match="max_concurrent"):
        parse("--rollouts_per_example", "5", "--max_concurrent", "4")


def test_an_environment_has_numbers_of_its_own() -> None:
    env = EvalEnvConfig(id="echo", num_examples=1, rollouts_per_example=3)
    config = EvalConfig(env=[env], num_examples=4, rollouts_per_example=2)
    assert [len(group) for group in rewards(config)] == [3]


def test_results_summary_and_metrics_are_written(tmp_path: Path) -> None:
    config = parse("--rollouts_per_example", "2", "--output_dir", str(tmp_path), "--model.name", "some/model")
    target = envs.Target([Client()], "m", version=20)
    for _ in range(2):
        summary = anyio.run(evaluate_environment, config, config.env[0], Echo(), target)
    folder = tmp_path / "evals" / "reverse-text"
    assert len(list(load_jsonl(folder / "results.jsonl"))) == 8
    written = json.loads((folder / "summary.json").read_text())
    assert written["avg@2"] == summary["avg@2"] and written["model"] == "some/model" and written["step"] == 20
    rows = list(load_jsonl(tmp_path / "metrics.jsonl"))
    assert [(row["step"], row["process"]) for row in rows] == [(20, "eval")] * 2
    assert rows[0]["eval/reverse-text/avg@2"] == summary["avg@2"]
    assert rows[0]["eval/reverse-text/metrics/exact_match"] == summary["metrics/exact_match"]


def test_a_row_of_the_table() -> None:
    row = format_row({**envs.summarize([[rollout(1.0)], [rollout(0.5)]], 1, 1.0), "time": 1.0})
    assert row["avg@1"] == "0.7500 ± 0.2500"
    assert row["pass@1"] == "0.5000"
    assert row["truncated"] == "0.0%"


def test_strict_servers_get_no_unknown_fields() -> None:
    ours = envs.build_request(SamplingConfig(), 2**40, "http://localhost:8000/v1")
    assert ours["extra_body"]["return_token_ids"] is True and ours["seed"] == 2**40
    strict = envs.build_request(SamplingConfig(), 2**40, "https://api.openai.com/v1")
    assert strict["extra_body"] == {} and "logprobs" not in strict and 0 <= strict["seed"] < 2**31


def test_who_serves_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert make_plan(parse("--model.name", "tiny-qwen3")) == Plan("tiny-qwen3", True, ())
    url = "http://localhost:1/v1"
    assert make_plan(parse("--model.name", "x", "--client.base-url", url)) == Plan("x", False, (url,))
    with pytest.raises(ValueError, match="OPENAI_API_KEY"):
        make_plan(parse())
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert make_plan(parse()) == Plan("gpt-4.1-mini", False, ("https://api.openai.com/v1",))
    for name in ("outputs/rl/weights/step_2O", "tiny-qwen", str(tmp_path)):
        with pytest.raises(ValueError, match=r"model\.name"):
            make_plan(parse("--model.name", name))


def test_a_series_of_steps(tmp_path: Path) -> None:
    for step in (5, 10):
        publish_step(tmp_path, step, lambda directory: (directory / "config.json").write_text("{}") and None)
    plan = make_plan(parse("--weights-dir", str(tmp_path)))
    assert plan == Plan(str(tmp_path / "step_5"), True, (), (5, 10))
    config = parse("--weights-dir", str(tmp_path), "--steps", "10")
    assert make_plan(config).steps == (10,)
    argv = build_server_argv(config, plan, 1234)
    assert argv[argv.index("--weight_dirs") + 1] == json.dumps([str(tmp_path)])
    with pytest.raises(ValueError, match=r"weights_dir .* step_7; there are: 5, 10"):
        make_plan(parse("--weights-dir", str(tmp_path), "--steps", "5,7"))
    with pytest.raises(ConfigError, match="weights_dir"):
        parse("--steps", "5")
