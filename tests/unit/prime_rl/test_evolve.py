"""Search of contexts: the optimum of `facts`, the front, resuming, invalid input."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from fake_api import FakeApi, serve_api
from loguru import logger

from prime_rl.client.contexts import shows_context
from prime_rl.config import RLConfig
from prime_rl.evolve.config import EvolveConfig
from prime_rl.evolve.evolve import (
    check_proposer,
    evolve,
    format_teacher_options,
    is_interrupted,
    run_search,
    show_search,
)
from prime_rl.evolve.proposer import build_proposer, describe_proposer, describe_result, extract_context
from prime_rl.evolve.search import Candidate, Search, find_front, select_parent
from prime_rl.generation.resume_log import Result
from prime_rl.generation.session import GenerationRun
from prime_rl.utils.client import InferenceClient
from prime_rl.utils.monitor import build_monitor
from prime_rl.utils.pydantic_config import parse_argv
from rollouts.agents import Turn
from rollouts.training.agent_integration import Rollout
from rollouts.training.environments import Environment, load_environment
from rollouts.training.environments.plain import PlainEnvironment
from rollouts.training.metrics import load_jsonl
from rollouts.training.types import Status

FACTS = "a3 b7 c1 d0 e5 f2 n4"
"""The last key is the only one of the eval split."""
WRONG = "a7 b0 c7 d7 e7 f7"
"""No value is right."""


def look_up(body: Mapping[str, Any]) -> str:
    """Values of the keys in the last line, from the table before it."""
    *tables, keys = body["messages"][-1]["content"].split("\n")
    table = dict(pair for line in tables for pair in line.split())
    return "".join(table.get(key, "?") for key in keys)


def correct_first_key(context: str, examples: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Copy the reference answer of the first failed example into the table."""
    table = {pair[0]: pair[1] for pair in context.split()}
    example = next(example for example in examples if example["reward"] < 1)
    table |= dict(zip(example["prompt"][-1]["content"], example["answer"], strict=True))
    return " ".join(key + value for key, value in table.items())


def give_up_on_d(context: str, examples: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    return correct_first_key(context, examples, rng) if rng.random() < 0.5 else context + f" d{rng.randrange(4, 8)}"


def repeat(context: str, examples: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    return "a4"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    with serve_api(FakeApi(reply=look_up, models=("gpt-m",))) as found:
        for name, value in found.environ.items():
            monkeypatch.setenv(name, value)
        yield found


def build_config(output_dir: Path, function: str = "correct_first_key", **keys: Any) -> EvolveConfig:
    env = {
        "id": "facts",
        "args": {"facts": FACTS, "num_asked": 1, "num_train_examples": 6, "num_eval_examples": 1},
        "num_workers": 0,
    }
    proposer = {"function": f"{__name__}:{function}"}
    values = {"env": [env], "model": {"name": "gpt-m"}, "context": WRONG, "minibatch_size": 1, "proposer": proposer}
    return EvolveConfig.model_validate({**values, "output_dir": output_dir, **keys})


def run(config: EvolveConfig, api: FakeApi, environment: Environment | None = None) -> Search:
    environment = environment or load_environment("facts", config.env[0].args)
    session = GenerationRun(config, {"facts": environment}, build_monitor(config.output_dir, "evolve"), (api.base_url,))
    return anyio.run(run_search, session, config, config.context, (api.base_url,))


def test_scripted_proposer_finds_the_facts_as_predicted(api: FakeApi, tmp_path: Path) -> None:
    search = run(build_config(tmp_path), api)
    n = len(search.examples)
    assert n == 6 and search.candidates[0].mean == 0 and search.best.mean == 1
    assert search.num_rollouts == len(api.requests) == n + n * n, "the first context, then one value for each proposal"
    assert (tmp_path / "evolve" / "best.md").read_text() == search.best.text
    rows = list(load_jsonl(tmp_path / "evolve" / "candidates.jsonl"))
    assert [row["parent"] for row in rows] == [None, *range(n)] and rows[-1]["best"]
    assert rows[1]["diff"].splitlines()[1:] == [f"-{WRONG}", f"+{rows[1]['text']}"]


@pytest.mark.parametrize("stop_after", [1, 5, 9, 14])
def test_interrupted_search_ends_in_the_same_candidates(api: FakeApi, tmp_path: Path, stop_after: int) -> None:
    whole = run(build_config(tmp_path / "a", "give_up_on_d", max_proposals=12), api)
    total, config = len(api.requests), build_config(tmp_path / "b", "give_up_on_d", max_proposals=12, max_retries=0)
    api.requests.clear()
    api.fail = lambda body: 500 if len(api.requests) > stop_after else None
    with pytest.raises(RuntimeError, match="run the same command"):
        run(config, api)
    api.requests.clear()
    api.fail = lambda body: None
    resumed = run(config, api)
    assert resumed.candidates == whole.candidates and resumed.num_rollouts == whole.num_rollouts == total
    assert len(api.requests) == total - stop_after, "recorded rollouts are not repeated"
    names = ("candidates.jsonl", "best.md", "summary.json")
    assert all((tmp_path / "a/evolve" / n).read_bytes() == (tmp_path / "b/evolve" / n).read_bytes() for n in names)


def test_another_search_keeps_the_files_of_the_first(api: FakeApi, tmp_path: Path) -> None:
    first = run(build_config(tmp_path), api)
    with pytest.raises(ValueError, match="budget = 1 is less"):
        run(build_config(tmp_path, context="a7", budget=1), api)
    assert (tmp_path / "evolve" / "best.md").read_text() == first.best.text
    other = run(build_config(tmp_path, context="a7", budget=6), api)
    assert (tmp_path / "evolve" / "best.md").read_text() == other.best.text == "a7"
    assert (tmp_path / "attempts" / "1" / "evolve" / "best.md").read_text() == first.best.text
    run(build_config(tmp_path, context="a7", budget=6, resume=False), api)
    api.requests.clear()
    again = run(build_config(tmp_path), api)
    assert again.candidates == first.candidates and not api.requests, "its rollouts and proposals are still recorded"
    run(build_config(tmp_path), api)
    assert [path.name for path in sorted((tmp_path / "attempts").iterdir())] == ["1", "2", "3"]


def test_other_rows_are_another_search(api: FakeApi, tmp_path: Path) -> None:
    """Proposals state facts of the rows that they were made from."""
    config, texts = build_config(tmp_path, context="a7"), []
    for answers in ("34", "56"):
        rows = [{"prompt": key, "answer": value} for key, value in zip("ab", answers, strict=True)]
        environment = PlainEnvironment(rows, lambda completion, answer: float(completion == answer))
        texts.append(run(config, api, environment).best.text)
    assert texts == ["a3 b4", "a5 b6"]
    assert (tmp_path / "attempts" / "1" / "evolve" / "best.md").read_text() == "a3 b4"


class SlowEnvironment(PlainEnvironment):
    """Rollouts of `a` take two seconds."""

    def __init__(self, timeout_s: float) -> None:
        rows = [{"prompt": key, "answer": value} for key, value in ("a7", "b0")]
        super().__init__(rows, lambda completion, answer: float(completion == answer))
        self.timeout_s = timeout_s

    async def run_group(self, row: Any, *args: Any, **options: Any) -> list[Rollout]:
        group = await super().run_group(row, *args, **options)
        if row["answer"] == "7" and self.timeout_s < 2:
            group = [Rollout(prompt="a", status=Status.FAILED, error_type="RolloutTimeout", error="1 s") for _ in group]
        return group


def test_a_longer_timeout_is_another_search(api: FakeApi, tmp_path: Path) -> None:
    """Rollouts that timed out would count as 0 for ever."""
    found = []
    for timeout in (1, 60):
        env = {"id": "facts", "timeout": timeout}
        config = build_config(tmp_path, context="a7 b0", budget=2, env=[env])
        found.append(run(config, api, SlowEnvironment(timeout)).candidates[0].mean)
    assert found == [0.5, 1.0]


def test_rewards_that_raise_count_as_zero(api: FakeApi, tmp_path: Path) -> None:
    def reward(completion: str, answer: str) -> float:
        return float(int(completion) == int(answer))  # of "?" it raises

    config = build_config(tmp_path, context="a3", max_retries=0)
    rows = [{"prompt": key, "answer": value} for key, value in ("a3", "b7")]
    search = run(config, api, PlainEnvironment(rows, reward))
    assert (search.candidates[0].mean, search.best.mean) == (0.5, 1.0)
    api.requests.clear()
    assert run(config, api, PlainEnvironment(rows, reward)).candidates == search.candidates and not api.requests
    broken = PlainEnvironment(rows, lambda completion: 1 / 0)
    with pytest.raises(RuntimeError, match="2 of 2 rollouts failed") as failure:
        run(build_config(tmp_path / "broken", max_retries=0), api, broken)
    assert "pass --no-resume" in str(failure.value), "what failed for good is not run again"


def test_rollouts_that_fail_on_their_own_count_as_zero(api: FakeApi, tmp_path: Path) -> None:
    def respond(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        int(messages[-1]["content"])  # of "?" it raises
        return []

    rows = [{"prompt": key, "answer": value} for key, value in ("a3", "b7")]
    environment = PlainEnvironment(
        rows,
        lambda completion, answer: float(completion == answer),
        respond=lambda messages, row, state: respond(messages),
    )
    config = build_config(tmp_path, context="a3", max_retries=0)
    search = run(config, api, environment)
    assert (search.candidates[0].mean, search.best.mean) == (0.5, 1.0)
    api.requests.clear()
    assert run(config, api, environment).candidates == search.candidates and not api.requests


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("InternalServerError", True),
        ("RateLimitError", True),
        ("InfraError", True),
        ("AuthenticationError", True),
        ("WorkerDied", True),
        ("APITimeoutError", False),
        ("RolloutTimeout", False),
        ("OverlongPrompt", False),
        ("RewardError", False),
        ("KeyError", False),
    ],
)
def test_rollouts_without_a_server_are_repeated(kind: str, expected: bool) -> None:
    assert is_interrupted(Result(error=f"{kind}: why")) == expected
    assert not is_interrupted(Result(error=f"{kind}: why", reward=0.0))


def test_search_stays_in_its_budget_and_continues(api: FakeApi, tmp_path: Path) -> None:
    short = run(build_config(tmp_path, budget=12), api)
    assert 12 - len(short.examples) < short.num_rollouts <= 12
    longer = run(build_config(tmp_path, budget=1000), api)
    assert longer.candidates[: len(short.candidates)] == short.candidates and longer.best.mean == 1
    assert len(api.requests) == longer.num_rollouts


def test_failed_examples_alone_are_searched(api: FakeApi, tmp_path: Path) -> None:
    api.reply = lambda body: "3" if body["messages"][-1]["content"] == "a" else look_up(body)
    search = run(build_config(tmp_path, examples="failed", context="a3"), api)
    prompts = [body["messages"][-1]["content"] for body in api.requests]
    solved = len([p for p in prompts if p == "a"])
    assert solved <= 1 and search.best.mean == 1 and not any(p.endswith("\na") for p in prompts)


@pytest.mark.parametrize("budget", [6, 1000])
def test_rollouts_without_a_context_count_once(api: FakeApi, tmp_path: Path, budget: int) -> None:
    search = run(build_config(tmp_path, examples="failed", context="", budget=budget), api)
    assert search.num_rollouts == len(api.requests)
    assert search.candidates[0].mean == 0.0 and len(search.candidates) == (7 if budget > 6 else 1)


def candidates(table: Sequence[Sequence[float]]) -> list[Candidate]:
    return [Candidate(i, str(i), scores=dict(enumerate(scores))) for i, scores in enumerate(table)]


def test_front_equals_brute_force() -> None:
    rng = random.Random(0)
    for _ in range(200):
        table = [[rng.randrange(3) for _ in range(4)] for _ in range(6)]
        beaten = {
            i
            for i, j in itertools.permutations(range(6), 2)
            if table[j] != table[i] and all(b >= a for a, b in zip(table[i], table[j], strict=True))
        }
        tops = [max(column) for column in zip(*table, strict=True)]
        wins = {i: [k for k in range(4) if table[i][k] == tops[k]] for i in set(range(6)) - beaten}
        assert find_front(candidates(table)) == {i: won for i, won in wins.items() if won}


def test_parents_are_drawn_by_their_wins() -> None:
    pool, rng = candidates([[1, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]), random.Random(0)
    drawn = [select_parent(pool, rng).number for _ in range(2000)]
    assert drawn.count(2) == 0 and abs(drawn.count(0) / 2000 - 0.75) < 0.04


def test_duplicate_and_empty_proposals_cost_nothing() -> None:
    texts = iter(["", "x", " "])

    async def evaluate(number: int, text: str, examples: Sequence[int]) -> dict[int, float]:
        return dict.fromkeys(examples, 0.0)

    async def propose(number: int, parent: Candidate, examples: Sequence[int]) -> str:
        return next(texts)

    limits = EvolveConfig.model_validate({"budget": 100, "max_proposals": 3})
    search = Search(limits, range(5), 2, evaluate, propose)
    anyio.run(search.run, "x")
    assert [c.status.value for c in search.candidates] == ["accepted", "empty", "duplicate", "empty"]
    assert search.num_rollouts == 10


def test_a_rounded_reward_ends_the_search() -> None:
    async def evaluate(number: int, text: str, examples: Sequence[int]) -> dict[int, float]:
        return dict.fromkeys(examples, 0.7 + 0.2 + 0.1)

    async def propose(number: int, parent: Candidate, examples: Sequence[int]) -> str:
        raise AssertionError("every example is solved")

    search = Search(EvolveConfig.model_validate({"budget": 100}), range(5), 2, evaluate, propose)
    anyio.run(search.run, "x")
    assert search.num_rollouts == 10


def test_search_ends_when_the_proposer_repeats_itself(api: FakeApi, tmp_path: Path) -> None:
    config = build_config(tmp_path, "repeat", max_repeats=3, max_proposals=100)
    statuses = [c.status.value for c in run(config, api).candidates]
    assert statuses == ["accepted", "rejected", *["duplicate"] * 3]
    again = run(config, api)
    assert [c.status.value for c in again.candidates] == statuses, "a resumed search ends at the same place"


def test_digest_of_a_function_follows_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    digests = list[str]()
    for text in ("one", "two"):
        (tmp_path / f"propose_{text}.py").write_text("from proposals import propose\n")
        (tmp_path / "proposals.py").write_text(f"def propose(context, examples, rng):\n    return {text!r}\n")
        config = build_config(tmp_path, proposer={"function": f"propose_{text}:propose"})
        digests.append(describe_proposer(config.proposer)["code"])
    assert len({*digests}) == 2
    model = build_config(tmp_path, proposer={}).proposer
    assert describe_proposer(model) == model.model_dump(exclude={"client"}), "as recorded by older releases"


def test_model_proposer_reads_examples_and_seeds_repeat(api: FakeApi, tmp_path: Path) -> None:
    def reply(body: Mapping[str, Any]) -> str:
        is_proposal = "Write a better context" in body["messages"][-1]["content"]
        return "Try:\n```\na3 b7 c1\nd0 e5 f2\n```" if is_proposal else look_up(body)

    api.reply = reply
    seeds = []
    for name in ("a", "b"):
        api.requests.clear()
        search = run(build_config(tmp_path / name, proposer={}), api)
        assert search.best.text == "a3 b7 c1\nd0 e5 f2" and search.best.mean == 1
        seeds.append([body["seed"] for body in api.requests])
    [body] = [body for body in api.requests if "Write a better" in body["messages"][-1]["content"]]
    request = body["messages"][-1]["content"]
    assert body["max_completion_tokens"] == 1024 and "max_tokens" not in body, "OpenAI reasoning models reject the old"
    assert WRONG in request and "Reference answer: " in request and sorted(seeds[0]) == sorted(seeds[1])


@pytest.mark.parametrize(
    ("limit", "shown", "context"), [(4, "abcd", "new"), (3, "bd", "new"), (1, "b", "new"), (0, "", "")]
)
def test_overlong_requests_show_fewer_examples(limit: int, shown: str, context: str, tmp_path: Path) -> None:
    """Those that the parent solves are left out first."""

    async def create(messages: list[dict[str, Any]], **_: Any) -> Any:
        prompts = re.findall(r"prompt-(\w)", messages[0]["content"])
        if len(prompts) > limit:
            raise InferenceClient("http://127.0.0.1:1/v1", seq_len=8).overlong(9)
        requests.append("".join(prompts))
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="new"), finish_reason="stop")])

    requests = list[str]()
    client: Any = SimpleNamespace(base_url="http://127.0.0.1:1/v1")
    client.chat = SimpleNamespace(completions=SimpleNamespace(create=create))
    rewards = {"a": 1.0, "b": 0.0, "c": 1.0, "d": 0.5}
    examples = [describe_result(f"prompt-{key}", Result(reward=reward)) for key, reward in rewards.items()]
    propose, warnings = build_proposer(build_config(tmp_path, proposer={}), client), list[str]()
    sink = logger.add(warnings.append, level="WARNING", format="{message}")
    assert anyio.run(propose, 1, "rules", examples) == context
    logger.remove(sink)
    assert "".join(requests) == shown
    words = "maximum context length is 8"  # of the server, as max_tokens may be the cause
    assert [words in line for line in warnings] == [True] * (not context)


@pytest.mark.parametrize(
    ("reply", "context"),
    [
        ("a\n```\nx\n```\nb\n```text\ny\nz\n```", "y\nz"),
        (" plain ", "plain"),
        ("Use ``` here.\n```x```", "Use ``` here.\n```x```"),
        ("New:\n```\nWrite\n```python\nx\n```\nand stop.\n```\nDone.", "Write\n```python\nx\n```\nand stop."),
        ("````md\nWrite\n```\nx\n```\n````", "Write\n```\nx\n```"),
        ("New:\n```\nx\ny", "x\ny"),
        ("New:\n```\nWrite\n```python\nx\n```\nand stop.", "Write\n```python\nx\n```\nand stop."),
        ("", ""),
        ("```\nfoo```", "foo"),
        ("Put it into ```", "Put it into ```"),
        ("Here: ```\nfoo\n```", "foo"),
        ("```text\nA\nB```\nbye", "A\nB"),
        ("```\nA\n``` done\nmore", "A"),
        ("```\nUse ```x``` here.\n```", "Use ```x``` here."),
        ("```md\nUse:\n```\ncode\n```\nend\n```", "Use:\n```\ncode\n```\nend"),
        ("```md\nA\n```\nor\n```md\nB\n```\nor\n```md\nC\n```", "C"),
        ("<think>\n```\nno\n```\nHm.\n</think>\n\nyes", "yes"),
        ("Hm: ```no```\n</think>\n```\nyes\n```", "yes"),
        ("\n<think>\n```\nno\n```\nHm.", ""),
        ("Think in <think> and </think>.", "Think in <think> and </think>."),
        ("```\nEnd with </think>.\n```", "End with </think>."),
    ],
)
def test_last_fenced_block_is_the_context(reply: str, context: str) -> None:
    assert extract_context(reply) == context


def test_reply_that_is_cut_before_its_end_is_empty() -> None:
    assert extract_context("```\na\n```\nNew:\n```\nx", is_cut=True) == ""
    assert extract_context("```\na\n```\nThis is", is_cut=True) == "a"
    assert extract_context("Half of a", is_cut=True) == extract_context("<think>Half of a", is_cut=True) == ""


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"proposer": {"template": "{context} {rows}"}}, r"unknown field \{rows\}: use \{context\}"),
        ({"proposer": {"template": "{context"}}, "double every brace"),
        ({"proposer": {"function": "a:b", "model": "m"}}, "remove one of them"),
        ({"env": [{"id": "facts"}, {"id": "modes"}]}, "run it for each"),
        ({"context_file": "x.md"}, "remove one of them"),
        ({"proposer": {"model": "other"}}, "set proposer.client.base_url"),
    ],
)
def test_invalid_settings_name_the_cure(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_config(tmp_path, **keys)


def test_unreachable_proposer_is_found_first(tmp_path: Path) -> None:
    proposer = {"model": "m", "client": {"base_url": ["http://127.0.0.1:9/v1"]}}
    with pytest.raises(ValueError, match=r"proposer\.client\.base_url .* does not respond: start that server"):
        check_proposer(build_config(tmp_path, proposer=proposer))
    with pytest.raises(ValueError, match=r"proposer\.function = 'nowhere:f' cannot be imported"):
        check_proposer(build_config(tmp_path, proposer={"function": "nowhere:f"}))


async def wait(context: str, examples: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    return context


def forget_rng(context: str, examples: Sequence[Mapping[str, Any]]) -> str:
    return context


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("wait", "is async: write it with def"),
        ("forget_rng", r"does not take the arguments \(context, examples, rng\)"),
    ],
)
def test_functions_that_cannot_propose_are_found_first(function: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"proposer.function = '{__name__}:{function}' {words}"):
        check_proposer(build_config(tmp_path, function))


def test_context_beyond_the_window_is_found_first(tmp_path: Path) -> None:
    config = build_config(tmp_path, model={"name": "tiny-qwen3", "max_model_len": 16}, context="a3 b7 " * 20)
    with pytest.raises(ValueError, match=r"the initial context has .* the model's window is 16: shorten the context"):
        evolve(config)


def test_games_that_write_their_prompts_are_refused(api: FakeApi, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="writes the prompt of every move itself: evolve cannot insert a context"):
        run(build_config(tmp_path), api, load_environment("nim"))
    assert not api.requests


def test_requests_without_the_context_are_noticed() -> None:
    def build_rollout(*requests: dict[str, Any] | None) -> Rollout:
        return Rollout(prompt="", turns=[Turn([1], [2], [-1.0], chat_request=request) for request in requests])

    title: dict[str, Any] = {"messages": [{"role": "user", "content": "Name this."}]}
    task = {"messages": [{"role": "system", "content": [{"type": "text", "text": 'Say "é"\nand stop.'}]}]}
    assert shows_context(build_rollout(title, task), 'Say "é"\nand') and shows_context(build_rollout(title), "")
    assert shows_context(build_rollout(), "C") and shows_context(build_rollout(None), "C")
    assert shows_context(build_rollout(title), "Name this.\n\n")
    assert not shows_context(build_rollout(title, None), "C")
    as_messages: list[dict[str, Any]] = [{"role": "user", "content": "Name "}, {"role": "assistant", "content": None}]
    assert shows_context(build_rollout(title), as_messages)
    assert not shows_context(build_rollout(title), [*as_messages, {"role": "user", "content": "C"}])


def test_an_environment_with_other_prompts_ends_the_search(
    api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_rl.client.contexts.shows_context", lambda rollout, context: False)
    config = build_config(tmp_path)
    for _ in range(2):  # a resumed search, too
        with pytest.raises(ValueError, match="'facts' does not send the prompts of its rows"):
            run(config, api)


def test_budget_below_the_first_context(api: FakeApi, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"budget = 2 is less than the \d rollouts of the first context: raise it"):
        run(build_config(tmp_path, budget=2), api)


@pytest.mark.parametrize(("budget", "is_enough"), [(11, True), (10, False)])
def test_budget_of_a_search_on_failed_examples(budget: int, is_enough: bool, api: FakeApi, tmp_path: Path) -> None:
    """Six examples without a context, five that fail with one."""
    rows = [{"prompt": key, "answer": value} for key, value in ("a3", "b7", "c1", "d2", "e5", "f4")]
    environment = PlainEnvironment(rows, lambda completion, answer: float(completion == answer))
    api.reply = lambda body: "3" if body["messages"][-1]["content"] == "a" else look_up(body)
    config = build_config(tmp_path, examples="failed", context="a3", budget=budget)
    with nullcontext() if is_enough else pytest.raises(ValueError, match="budget = 10 is less than the 11 rollouts"):
        assert run(config, api, environment).num_rollouts == 11


@pytest.mark.parametrize(("text", "is_found"), [("", False), ("a rule", True)])
def test_only_a_context_is_offered_for_distillation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, is_found: bool
) -> None:
    config = build_config(tmp_path)
    search = Search(config, [0], 1, lambda *_: None, lambda *_: None)  # type: ignore[arg-type, return-value]
    search.candidates.append(Candidate(0, text, scores={0: 0.5}))
    show_search(search, config)
    shown = capsys.readouterr().out
    assert ("distill" in shown and "context-file" in shown) == is_found
    assert ("No context improved the score" in shown) != is_found


@pytest.mark.parametrize("separator", ["\n", "it's\\\n\t", "---", ""])
def test_printed_options_distill_what_was_searched(tmp_path: Path, separator: str) -> None:
    config = build_config(tmp_path, separator=separator, context_position="system_replace")
    text = format_teacher_options(tmp_path / "the best.md", config)
    assert "\n" not in text
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {text}"], capture_output=True, text=True, check=True).stdout
    teacher = parse_argv(RLConfig, words.split("\0")[:-1], "rl", {})[0].orchestrator.teacher_model
    assert teacher is not None and teacher.context_file == tmp_path / "the best.md"
    assert (teacher.separator, teacher.context_position) == (separator, "system_replace")
