"""From attempts to training data: filters, rows, and reading them with `sft`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from fake_api import KEY, FakeApi, serve_api

from prime_rl.configuration.sections import ClientConfig
from prime_rl.eval.config import EvalConfig
from prime_rl.eval.eval import evaluate
from prime_rl.generation.resume_log import Result
from prime_rl.generation.rollout_jobs import ModelEndpoint
from prime_rl.generation.session import GenerationRun
from prime_rl.runtime.machine import find_free_port
from prime_rl.runtime.run_state import read_run_state
from prime_rl.runtime.tokenizer import load_tokenizer
from prime_rl.synthesize.config import SynthesisFilterConfig, SynthesizeConfig
from prime_rl.synthesize.rows import FilterVerdict, choose_results, to_row
from prime_rl.synthesize.synthesize import synthesize, synthesize_environment, write_rows
from prime_rl.utils.client import build_clients
from prime_rl.utils.monitor import build_monitor
from rollouts.training.agent_integration import Rollout
from rollouts.training.datasets.chat import TemplateRenderer
from rollouts.training.datasets.rows import iter_rows
from rollouts.training.datasets.sft import find_trained_turns, read_conversation, render_conversation
from rollouts.training.environments import load_environment
from rollouts.training.metrics import load_jsonl


def result(reward: float | None = 1.0, output: str = "cba", **fields: Any) -> Result:
    prompt = [{"role": "user", "content": "abc"}]
    return Result(prompt=prompt, completion=[{"role": "assistant", "content": output}], reward=reward, **fields)


def verdicts(*groups: list[Result], **keep: Any) -> list[list[str]]:
    return choose_results(groups, SynthesisFilterConfig(**keep))


def test_reward_bounds() -> None:
    group = [result(0.2, "a"), result(0.5, "b"), result(1.0, "c"), result(None, "")]
    assert verdicts(group) == [["kept", "kept", "kept", "failed"]]
    assert verdicts(group, min_reward=0.5, max_reward=0.9) == [
        ["below_min_reward", "kept", "above_max_reward", "failed"]
    ]
    rounded = [result(0.7 + 0.2 + 0.1, "a"), result(0.1 + 0.2, "b")]
    assert verdicts(rounded, min_reward=1.0) == [["kept", "below_min_reward"]]
    assert verdicts(rounded, max_reward=0.3) == [["above_max_reward", "kept"]], "0.30000000000000004"


def test_truncated_and_empty_rollouts_are_dropped() -> None:
    group = [result(1.0, "a", is_truncated=True), result(1.0, "")]
    assert verdicts(group) == [["truncated", "empty"]]
    assert verdicts(group, truncated=True) == [["kept", "empty"]]


def test_an_answer_that_was_cut_off_has_no_loss() -> None:
    """`sft` would train an end token after it."""
    answers = [{"role": "assistant", "content": text} for text in ("a", "b")]
    asked = {"role": "user", "content": "more"}
    several = Result(prompt="p", completion=[answers[0], asked, answers[1]], reward=1.0, is_truncated=True)
    single = result(1.0, "c", is_truncated=True)
    plain = Result(prompt="p", completion="d", reward=1.0, is_truncated=True)
    for stop_reason, expected in (("length", ["kept", *["truncated"] * 2]), ("max_turns", ["kept"] * 3)):
        several.stop_reason = single.stop_reason = plain.stop_reason = stop_reason
        assert verdicts([several, single, plain], truncated=True) == [expected]
        conversation = read_conversation(to_row(several, "env", "m"), 0)
        turns = [start for start, _ in find_trained_turns(conversation)]
        assert turns == ([1] if stop_reason == "length" else [1, 3])


def test_duplicate_conversations_are_dropped() -> None:
    groups = [[result(0.5), result(1.0)], [result(1.0, "Cba!"), result(1.0, "other")]]
    assert verdicts(*groups, dedupe="off") == [["kept", "kept"], ["kept", "kept"]]
    assert verdicts(*groups) == [["duplicate", "kept"], ["kept", "kept"]]
    assert verdicts(*groups, dedupe="loose") == [["duplicate", "kept"], ["duplicate", "kept"]]


def test_loose_duplicates_ignore_line_breaks() -> None:
    outputs = ["The answer\nis 3.", "the\tanswer is 3", "\r\n The ANSWER, is\u20283!", "The answer is 4."]
    assert verdicts([result(1.0, output) for output in outputs], dedupe="loose") == [
        ["kept", *["duplicate"] * 2, "kept"]
    ]


def test_dropped_conversation_does_not_block_duplicate() -> None:
    groups = [[result(1.0, is_truncated=True)], [result(1.0)]]
    assert verdicts(*groups) == [["truncated"], ["kept"]]


def test_dedupe_ignores_tool_call_ids() -> None:
    def calling(name: str) -> Result:
        call = {"id": name, "type": "function", "function": {"name": "add", "arguments": "{}"}}
        output = {"role": "assistant", "content": "", "tool_calls": [call]}
        return Result(
            prompt="p", completion=[output, {"role": "tool", "content": "3", "tool_call_id": name}], reward=1.0
        )

    assert verdicts([calling("one"), calling("two")]) == [["kept", "duplicate"]]


def test_best_rollouts_of_example_are_kept() -> None:
    group = [result(0.1, "a"), result(0.9, "b"), result(0.5, "c"), result(0.9, "d")]
    over = "over_max_per_example"
    assert verdicts(group, max_per_example=2) == [[over, "kept", over, "kept"]]
    assert verdicts(group, max_per_example=1) == [[over, "kept", over, over]]


def test_row_ends_with_last_model_message() -> None:
    requested = {"role": "user", "content": "sure?"}
    output = [{"role": "assistant", "content": "yes"}, requested]
    row = to_row(Result(prompt="p", completion=output, reward=0.5, example_id=3), "env", "m")
    assert row["completion"] == output[:1] and "tools" not in row
    assert (row["env"], row["example_id"], row["reward"], row["model"]) == ("env", 3, 0.5, "m")


def test_rows_have_the_template_arguments_of_requests(tmp_path: Path) -> None:
    """With others, `sft` would render another prompt, such as one that asks for reasoning."""
    prompt, output = [{"role": "user", "content": "abc"}], [{"role": "assistant", "content": "cba"}]

    class Environment:
        id = "reverse"

        def rows(self, split: str = "train") -> list[dict[str, Any]]:
            return [{"prompt": prompt, "example_id": 0}]

        async def run_group(self, *args: Any, **options: Any) -> list[Rollout]:
            return [Rollout(prompt=prompt, completion=output, reward=1.0)]

    for given in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
        values = {"sampling": {"extra_body": given}, "model": {"name": "m"}, "output_dir": tmp_path}
        config, environment = SynthesizeConfig.model_validate(values), Environment()
        run = GenerationRun(config, {"reverse-text": environment}, build_monitor(tmp_path, "synthesize"))
        endpoint = ModelEndpoint([SimpleNamespace(base_url="http://localhost:1/v1")], "m")
        anyio.run(synthesize_environment, run, config, config.env[0], environment, endpoint)
        run.close_resume_logs(remove=True)
        [row] = iter_rows(str(tmp_path / "synthesize"))
        assert read_conversation(row, 0).template_kwargs == given.get("chat_template_kwargs", {})


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serve_api(FakeApi(models=("gpt-m",))) as found:
        monkeypatch.setenv("OPENAI_BASE_URL", found.base_url)
        yield found


def make_data(
    kind: str, api: FakeApi, output_dir: Path, *, remove: bool = True, **options: Any
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Rows of one of the small environments, as the command makes them, and its summary."""
    env = {"id": "adapter_envs", "name": kind, "args": {"kind": kind}}
    values = {"env": [env], "model": {"name": "gpt-m"}, "output_dir": output_dir, **options}
    config = SynthesizeConfig.model_validate(values)
    environment = load_environment("adapter_envs", {"kind": kind}, search_dirs=[Path(__file__).parents[2] / "fakes"])

    async def main() -> dict[str, float]:
        clients = build_clients(ClientConfig(base_url=[api.base_url]))
        run = GenerationRun(config, {kind: environment}, build_monitor(output_dir, "synthesize"))
        summary = await synthesize_environment(run, config, config.env[0], environment, ModelEndpoint(clients, "gpt-m"))
        run.close_resume_logs(remove=remove)
        for client in clients:
            await client.close()
        return summary

    return anyio.run(main), [dict(row) for row in iter_rows(str(output_dir / "synthesize"))]


def test_an_interrupted_split_is_not_reused_for_the_other(api: FakeApi, tmp_path: Path) -> None:
    api.reply = lambda body: "yes"
    for split, num_requests in (("train", 1), ("train", 1), ("eval", 2)):
        make_data("single", api, tmp_path, remove=False, split=split)
        assert len(api.requests) == num_requests


def test_data_of_another_model_are_kept(api: FakeApi, tmp_path: Path) -> None:
    api.reply = lambda body: "yes"
    for name in ("first", "first", "second"):
        [row] = make_data("single", api, tmp_path, model={"name": name})[1]
        assert row["model"] == name
    [folder] = (tmp_path / "attempts").iterdir()
    assert [row["model"] for row in load_jsonl(folder / "synthesize" / "single.jsonl")] == ["first"]
    assert [path.name for path in (folder / "synthesize" / "rollouts" / "single").iterdir()] == ["results.jsonl"]


def test_games_of_several_seats_are_refused(tmp_path: Path) -> None:
    config = SynthesizeConfig.model_validate({"env": [{"id": "nim"}], "model": {"name": "m"}, "output_dir": tmp_path})
    game, anything = load_environment("nim"), SimpleNamespace()
    with pytest.raises(ValueError, match="'nim' writes the prompt of every move itself: synthesize cannot"):
        anyio.run(synthesize_environment, anything, config, config.env[0], game, anything)


def test_a_failed_synthesis_is_recorded(tmp_path: Path) -> None:
    client = {"base_url": [f"http://127.0.0.1:{find_free_port()}/v1"]}
    values = {"env": [{"id": "reverse-text"}], "model": {"name": "m"}, "client": client, "output_dir": tmp_path}
    with pytest.raises(ConnectionError):
        synthesize(SynthesizeConfig.model_validate(values))
    state = read_run_state(tmp_path)
    assert state is not None and (state.command, state.status) == ("synthesize", "failed")


@pytest.mark.parametrize(("kind", "command"), [(EvalConfig, evaluate), (SynthesizeConfig, synthesize)])
def test_other_environments_run_after_one_that_failed(
    kind: Any, command: Any, api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, reward in (("bad", "1 / 0"), ("good", "1.0")):
        (tmp_path / f"{name}.py").write_text(
            "from rollouts.training.environments.plain import PlainEnvironment\n\n\n"
            "def load_environment():\n"
            "    rows = [{'prompt': 'a'}]\n"
            f"    return PlainEnvironment(rows, lambda completion: {reward}, eval_dataset=rows)\n"
        )
    envs = [{"id": str(tmp_path / f"{name}.py"), "name": name, "num_workers": 0} for name in ("bad", "good")]
    values = {"env": envs, "model": {"name": "gpt-m"}, "output_dir": tmp_path / "out", "max_retries": 0}
    for _ in range(2):
        with pytest.raises(RuntimeError, match="all rollouts of bad failed; last error: RewardError"):
            command(kind.model_validate(values))
        shown = capsys.readouterr().out
        assert re.search(r"^ *good\b", shown, re.MULTILINE) and "metrics.jsonl" in shown
    assert len(api.requests) == 3, "the result of the other one is kept"
    state = read_run_state(tmp_path / "out")
    assert state is not None and state.status == "failed"


def test_all_environments_are_training_data(tmp_path: Path) -> None:
    """Names of environments may contain words that are splits in other data sets."""
    for name in ("gsm8k", "train-schedules", "unit-test"):
        write_rows(tmp_path, name, [[result()]], [[FilterVerdict.KEPT]], "m")
    (tmp_path / "test.jsonl").write_text('{"env": "held out"}\n')
    assert [row["env"] for row in iter_rows(str(tmp_path))] == ["gsm8k", "train-schedules", "unit-test"]
    assert [row["env"] for row in iter_rows(str(tmp_path), "test")] == ["held out"]


def learnt_text(row: dict[str, Any]) -> str:
    """What `sft` would put loss on."""
    tokenizer = load_tokenizer("tiny-qwen3")
    sample = render_conversation(read_conversation(row, 0), TemplateRenderer(tokenizer))
    return str(tokenizer.decode([t for t, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask]))


def test_single_turn_is_trained_verbatim(api: FakeApi, tmp_path: Path) -> None:
    api.reply = lambda body: "yes"
    summary, rows = make_data("single", api, tmp_path)
    assert api.refusals == [] and (summary["kept"], summary["kept/reward/mean"]) == (1, 1.0)
    assert learnt_text(rows[0]).startswith("yes") and "is it" not in learnt_text(rows[0])


def test_multi_turn_trains_model_turns(api: FakeApi, tmp_path: Path) -> None:
    turns = iter(["perhaps", "likely", "yes"])
    api.reply = lambda body: next(turns)
    [row] = make_data("multi", api, tmp_path)[1]
    assert [message["role"] for message in row["completion"]] == ["assistant", "user"] * 2 + ["assistant"]
    trained = learnt_text(row)
    assert all(word in trained for word in ("perhaps", "likely", "yes")) and "sure" not in trained


def test_tool_calls_are_trained_results_are_not(api: FakeApi, tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> Any:
        if body["messages"][-1]["role"] == "tool":
            return "yes"
        function = {"name": "add", "arguments": json.dumps({"x": 40, "y": 2})}
        return {"content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}

    api.reply = reply
    [row] = make_data("tool", api, tmp_path)[1]
    assert [tool["function"]["name"] for tool in row["tools"]] == ["add"]
    trained = learnt_text(row)
    assert '"add"' in trained and "40" in trained and "yes" in trained and "42" not in trained
    kept = list(load_jsonl(tmp_path / "synthesize" / "rollouts" / "tool" / "results.jsonl"))
    assert [line["verdict"] for line in kept] == ["kept"]
