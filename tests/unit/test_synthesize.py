"""From attempts to training data: the filters, the rows, and that `sft` reads them as they were said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from fake_api import KEY, FakeApi, serve_api
from prime_rl.synthesize.config import KeepConfig, SynthesizeConfig
from prime_rl.synthesize.rows import choose_results, to_row
from prime_rl.synthesize.synthesize import synthesize_environment
from prime_rl.utils.ask_command import AskRun
from prime_rl.utils.asking import Target
from prime_rl.utils.client import build_clients
from prime_rl.utils.config import ClientConfig
from prime_rl.utils.journal import Result
from prime_rl.utils.monitor import build_monitor
from prime_rl.utils.tokenizer import load_tokenizer
from rollouts.training.datasets.chat import TemplateRenderer
from rollouts.training.datasets.rows import iter_rows
from rollouts.training.datasets.sft import read_conversation, render_conversation
from rollouts.training.environments import load_environment
from rollouts.training.metrics import load_jsonl


def result(reward: float | None = 1.0, said: str = "cba", **fields: Any) -> Result:
    prompt = [{"role": "user", "content": "abc"}]
    return Result(prompt=prompt, completion=[{"role": "assistant", "content": said}], reward=reward, **fields)


def verdicts(*groups: list[Result], **keep: Any) -> list[list[str]]:
    return choose_results(groups, KeepConfig(**keep))


def test_rewards_decide() -> None:
    group = [result(0.2, "a"), result(0.5, "b"), result(1.0, "c"), result(None, "")]
    assert verdicts(group) == [["kept", "kept", "kept", "failed"]]
    assert verdicts(group, min_reward=0.5, max_reward=0.9) == [
        ["reward below min_reward", "kept", "reward above max_reward", "failed"]
    ]


def test_what_was_cut_off_or_says_nothing_teaches_nothing() -> None:
    group = [result(1.0, "a", is_truncated=True), result(1.0, "")]
    assert verdicts(group) == [["truncated", "empty"]]
    assert verdicts(group, truncated=True) == [["kept", "empty"]]


def test_one_of_equal_conversations_stays() -> None:
    groups = [[result(0.5), result(1.0)], [result(1.0, "Cba!"), result(1.0, "other")]]
    assert verdicts(*groups, dedupe="off") == [["kept", "kept"], ["kept", "kept"]]
    assert verdicts(*groups) == [["duplicate", "kept"], ["kept", "kept"]]
    assert verdicts(*groups, dedupe="loose") == [["duplicate", "kept"], ["duplicate", "kept"]]


def test_a_dropped_conversation_does_not_stand_in_the_way_of_its_equal() -> None:
    groups = [[result(1.0, is_truncated=True)], [result(1.0)]]
    assert verdicts(*groups) == [["truncated"], ["kept"]]


def test_the_names_of_tool_calls_do_not_make_two_of_one() -> None:
    def calling(name: str) -> Result:
        call = {"id": name, "type": "function", "function": {"name": "add", "arguments": "{}"}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        return Result(prompt="p", completion=[said, {"role": "tool", "content": "3", "tool_call_id": name}], reward=1.0)

    assert verdicts([calling("one"), calling("two")]) == [["kept", "duplicate"]]


def test_the_best_of_an_example_stay() -> None:
    group = [result(0.1, "a"), result(0.9, "b"), result(0.5, "c"), result(0.9, "d")]
    over = "over max_per_example"
    assert verdicts(group, max_per_example=2) == [[over, "kept", over, "kept"]]
    assert verdicts(group, max_per_example=1) == [[over, "kept", over, over]]


def test_a_row_ends_with_the_models_last_word() -> None:
    asked = {"role": "user", "content": "sure?"}
    said = [{"role": "assistant", "content": "yes"}, asked]
    row = to_row(Result(prompt="p", completion=said, reward=0.5, example_id=3), "env", "m")
    assert row["completion"] == said[:1] and "tools" not in row
    assert (row["env"], row["example_id"], row["reward"], row["model"]) == ("env", 3, 0.5, "m")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serve_api(FakeApi(models=("m",))) as found:
        monkeypatch.setenv("OPENAI_BASE_URL", found.base_url)
        yield found


def make_data(kind: str, api: FakeApi, output_dir: Path) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Rows of one of the small environments, as the command makes them, and its summary."""
    env = {"id": "door_envs", "name": kind, "args": {"kind": kind}}
    config = SynthesizeConfig.model_validate({"env": [env], "model": {"name": "m"}, "output_dir": output_dir})
    environment = load_environment("door_envs", {"kind": kind}, search_dirs=[Path(__file__).parent])

    async def main() -> dict[str, float]:
        clients = build_clients(ClientConfig(base_url=[api.base_url]))
        run = AskRun(config, {kind: environment}, build_monitor(output_dir, "synthesize"))
        summary = await synthesize_environment(run, config, config.env[0], environment, Target(clients, "m"))
        run.close_journals(remove=True)
        for client in clients:
            await client.close()
        return summary

    return anyio.run(main), [dict(row) for row in iter_rows(str(output_dir / "synthesize"))]


def learnt_text(row: dict[str, Any]) -> str:
    """What `sft` would put loss on."""
    tokenizer = load_tokenizer("tiny-qwen3")
    sample = render_conversation(read_conversation(row, 0), TemplateRenderer(tokenizer))
    return str(tokenizer.decode([t for t, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask]))


def test_a_single_turn_is_learnt_as_it_was_said(api: FakeApi, tmp_path: Path) -> None:
    api.reply = lambda body: "yes"
    summary, rows = make_data("single", api, tmp_path)
    assert api.refusals == [] and (summary["kept"], summary["kept/reward/mean"]) == (1, 1.0)
    assert learnt_text(rows[0]).startswith("yes") and "is it" not in learnt_text(rows[0])


def test_of_several_turns_the_models_are_learnt(api: FakeApi, tmp_path: Path) -> None:
    turns = iter(["perhaps", "likely", "yes"])
    api.reply = lambda body: next(turns)
    [row] = make_data("multi", api, tmp_path)[1]
    assert [message["role"] for message in row["completion"]] == ["assistant", "user"] * 2 + ["assistant"]
    learnt = learnt_text(row)
    assert all(word in learnt for word in ("perhaps", "likely", "yes")) and "sure" not in learnt


def test_tool_calls_are_learnt_and_their_results_are_not(api: FakeApi, tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> Any:
        if body["messages"][-1]["role"] == "tool":
            return "yes"
        function = {"name": "add", "arguments": json.dumps({"x": 40, "y": 2})}
        return {"content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}

    api.reply = reply
    [row] = make_data("tool", api, tmp_path)[1]
    assert [tool["function"]["name"] for tool in row["tools"]] == ["add"]
    learnt = learnt_text(row)
    assert '"add"' in learnt and "40" in learnt and "yes" in learnt and "42" not in learnt
    kept = list(load_jsonl(tmp_path / "synthesize" / "rollouts" / "tool" / "results.jsonl"))
    assert [line["verdict"] for line in kept] == ["kept"]
