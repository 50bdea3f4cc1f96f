"""Environments: lookup, groups against a server, and conversion of turns to samples."""

from __future__ import annotations

import importlib
import itertools
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from fake_engine import FakeEngine, serve
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.configuration.sections import SamplingConfig
from prime_rl.utils.client import InferenceClient
from prime_rl.utils.vf import build_sampling_args
from rollouts.agents import Turn
from rollouts.training.agent_integration import Rollout, rollout_to_samples
from rollouts.training.environments import Environment, load_environment
from rollouts.training.environments import resolve as finding
from rollouts.training.types import Status

SMALL = {"num_train_examples": 20, "num_eval_examples": 10, "min_length": 4, "max_length": 8}


def oracle(body: dict[str, Any]) -> str:
    return f"<reversed_text>{body['messages'][-1]['content'][::-1]}</reversed_text>"


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with serve(FakeEngine(reply=oracle)) as engine:
        yield engine


@pytest.fixture(autouse=True)
def fresh(engine: FakeEngine) -> None:
    engine.fail, engine.reply, engine.max_model_len, engine.latency_s = lambda body: None, oracle, 10_000, 0.0
    engine.requests.clear()


@pytest.fixture(scope="module")
def reverse_text() -> Environment:
    return load_environment("reverse-text", SMALL)


def args(n: int, **extra: Any) -> list[dict[str, Any]]:
    return [build_sampling_args(SamplingConfig(**extra), seed) for seed in range(100, 100 + n)]


def run_group(env: Environment, engine: FakeEngine, n: int, retries: int = 0, **extra: Any) -> list[Rollout]:
    async def main() -> list[Rollout]:
        client = InferenceClient(engine.base_url)
        try:
            return await env.run_group(env.rows()[0], client, "m", args(n, **extra), retries)
        finally:
            await client.close()

    return anyio.run(main)


def test_a_group_against_a_server(reverse_text: Environment, engine: FakeEngine) -> None:
    rollouts = run_group(reverse_text, engine, 3, temperature=0.7, max_tokens=60, stop=["\n"], min_p=0.1)
    assert [r.reward for r in rollouts] == [1.0] * 3
    assert rollouts[0].metrics["exact_match"] == 1.0 and rollouts[0].metrics["lcs_reward_func"] == 1.0
    assert (rollouts[0].status, rollouts[0].temperature, rollouts[0].num_turns) == (Status.COMPLETED, 0.7, 1)
    assert sorted(body["seed"] for body in engine.requests) == [100, 101, 102]
    body = engine.requests[0]
    assert body["max_completion_tokens"] == 60 and body["stop"] == ["\n"] and body["min_p"] == 0.1 and body["logprobs"]
    [sample] = rollout_to_samples(rollouts[1], group_index=7, index=1)
    sample.validate()
    start = sample.loss_mask.index(1.0)
    assert "".join(map(chr, sample.tokens[start:])) == sample.response == rollouts[1].response
    assert sample.inference_logprobs is not None and sample.inference_logprobs[start] == -0.5
    assert sample.versions == [(start, engine.version)] and (sample.group_index, sample.index) == (7, 1)


def test_truncation_is_a_status_and_a_reason(reverse_text: Environment, engine: FakeEngine) -> None:
    [rollout] = run_group(reverse_text, engine, 1, max_tokens=5)
    assert (rollout.status, rollout.stop_reason, rollout.reward) == (Status.TRUNCATED, "length", 0.0)


def test_failed_rollouts_are_not_scored(reverse_text: Environment, engine: FakeEngine) -> None:
    engine.fail = lambda body: 400 if body["seed"] == 101 else None
    good, bad, other = run_group(reverse_text, engine, 3)
    assert (good.reward, other.reward, good.failed, other.failed) == (1.0, 1.0, False, False)
    assert bad.failed and bad.error_type == "BadRequestError" and "scripted failure" in str(bad.error)
    assert bad.reward == 0.0 and not bad.metrics and not bad.turns


def test_failed_rollout_is_retried_with_another_seed(reverse_text: Environment, engine: FakeEngine) -> None:
    engine.fail = lambda body: 400 if body["seed"] in (100, 101) else None
    [rollout] = run_group(reverse_text, engine, 1, retries=2)
    assert not rollout.failed and [body["seed"] for body in engine.requests] == [100, 101, 102]


def test_an_overlong_prompt_fails_at_once(reverse_text: Environment, engine: FakeEngine) -> None:
    engine.max_model_len = 2
    [rollout] = run_group(reverse_text, engine, 1, retries=5)
    assert rollout.failed and rollout.error_type == "OverlongPrompt" and len(engine.requests) == 1


def write_environment(folder: Path, name: str, code: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / f"{name}.py").write_text("import verifiers as vf\nfrom datasets import Dataset\n" + code)


ROWS = 'Dataset.from_list([{"question": "q", "answer": "a"}])'


def test_environment_errors_are_contained(tmp_path: Path, engine: FakeEngine) -> None:
    code = f"""
calls = []
class Odd(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("oops")
        return [{{"role": "user", "content": "again"}}]

def strict(completion):
    return float(completion[-1]["content"])

async def fine(completion, state, **kwargs):
    return len(state["trajectory"])

def load_environment():
    rubric = vf.Rubric(funcs=[strict, fine], weights=[1.0, 0.5])
    return Odd(dataset={ROWS}, rubric=rubric, max_turns=2)
"""
    write_environment(tmp_path, "odd_env", code)
    engine.reply = lambda body: "word"
    env = load_environment("odd-env", search_dirs=[tmp_path])
    first, second = sorted(run_group(env, engine, 2), key=lambda r: not r.failed)
    assert first.failed and first.error_type == "KeyError"
    # verifiers makes a raising reward function a silent 0: the reward stays, the error is recorded
    assert second.reward == 1.0 and second.metrics["strict"] == 0.0 and second.metrics["fine"] == 2.0
    assert second.error_type == "RewardError" and "strict: ValueError: could not convert" in str(second.error)
    assert str(second.error).endswith("odd_env.py:13)")
    assert len(second.turns) == 2 and len(rollout_to_samples(second)) == 2  # this server's template is not a prefix


def test_rubric_error_fails_only_its_group(tmp_path: Path, engine: FakeEngine) -> None:
    code = f"""
class Broken(vf.Rubric):
    async def score_group(self, states):
        raise RuntimeError("judge is out")

def load_environment():
    return vf.SingleTurnEnv(dataset={ROWS}, rubric=Broken())
"""
    write_environment(tmp_path, "broken_rubric", code)
    rollouts = run_group(load_environment("broken-rubric", search_dirs=[tmp_path]), engine, 2)
    assert all(r.failed and "scoring failed: judge is out" in str(r.error) for r in rollouts)


def test_ids_are_looked_up_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_environment(
        tmp_path / "b", "some_env", f"def load_environment(n=1):\n    return vf.SingleTurnEnv(dataset={ROWS})"
    )
    env = load_environment("anyone/some-env@1.2", {"n": 2}, search_dirs=[tmp_path / "a", tmp_path / "b"])
    assert env.rows()[0]["answer"] == "a" and env.id == "anyone/some-env@1.2"
    monkeypatch.delitem(sys.modules, "some_env")
    assert load_environment("some-env", search_dirs=[]).rows()  # as an installed module
    with pytest.raises(ValueError) as error:
        load_environment("no-such-env", search_dirs=[tmp_path / "a", tmp_path / "b"])
    assert str(error.value) == (
        f"environment 'no-such-env' was not found: {tmp_path / 'a'} and {tmp_path / 'b'} hold some-env, and no module "
        "no_such_env is installed; correct env.id, install its package, or set env.install = true"
    )
    with pytest.raises(ValueError, match=re.escape("(did you mean 'some-env'?)")):
        load_environment("sume-env", search_dirs=[tmp_path / "b"])


def test_an_installed_environment_has_the_requested_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "versioned_env.py").write_text("def load_environment(): ...\n")
    (tmp_path / "versioned_env-1.2.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: versioned-env\nVersion: 1.2\n"
    (tmp_path / "versioned_env-1.2.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(str(tmp_path))
    for version in ("", "@1.2", "@1.2.0", "@latest"):
        assert finding.find_environment(f"org/versioned-env{version}", []).module == "versioned_env"
    for version in ("1.3", "newest"):
        with pytest.raises(ValueError, match=rf"version 1\.2 is installed; install version {version}"):
            finding.find_environment(f"org/versioned-env@{version}", [])


@pytest.mark.parametrize(
    ("code", "env_args", "message"),
    [
        ("def load_environment(a=1): ...", {"b": 2}, "takes no argument 'b'; it takes a"),
        ("x = 1", {}, "has no function load_environment"),
        ("def load_environment(): raise OSError('no data')", {}, "did not load: OSError: no data"),
        ("import not_installed_anywhere\ndef load_environment(): ...", {}, "did not import: ModuleNotFoundError"),
    ],
)
def test_environments_that_do_not_load(tmp_path: Path, code: str, env_args: dict[str, Any], message: str) -> None:
    name = "bad_env_" + re.sub(r"\W", "", message)[:20]
    write_environment(tmp_path, name, code)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_environment(name, env_args, search_dirs=[tmp_path])


@pytest.mark.parametrize("how", ["import nowhere", "def __getattr__(name):\n    import nowhere"])
def test_import_error_has_file_and_line(tmp_path: Path, how: str) -> None:
    name = f"lazy_env_{len(how)}"
    (tmp_path / name / name).mkdir(parents=True)
    (tmp_path / name / name / "__init__.py").write_text("from .inner import *\nfrom .inner import __getattr__\n")
    (tmp_path / name / name / "inner.py").write_text(how)
    message = (
        rf"did not import: ModuleNotFoundError: No module named 'nowhere' \(.*inner\.py:{1 + how.count(chr(10))}\)"
    )
    with pytest.raises(ValueError, match=message):
        load_environment(name, search_dirs=[tmp_path])


def test_files_of_the_same_name_are_different_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the name of a library that is imported already."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    importlib.import_module("colorsys")
    for folder, prompt in (("a", "first"), ("b", "second")):
        (tmp_path / folder).mkdir()
        for name in ("same_task.py", "colorsys.py"):
            (tmp_path / folder / name).write_text(
                f"def load_environment(): return {{'dataset': [{{'prompt': {prompt!r}}}], 'rewards': lambda: 1.0}}\n"
            )
    for name in ("same_task.py", "colorsys.py"):
        for folder, prompt in (("a", "first"), ("b", "second"), ("a", "first"), ("b", "second")):
            [row] = load_environment(f"{tmp_path}/{folder}/{name}").rows()
            assert row["prompt"][-1]["content"] == prompt


def test_a_name_that_is_no_name() -> None:
    with pytest.raises(ValueError, match="is not a name"):
        load_environment("what is this")
    with pytest.raises(ValueError, match=r"is not a Python file, or a folder with passwd\.py"):
        load_environment("../../etc/passwd")


@pytest.mark.parametrize("version", ["0.1.8.post2", "0.1.9", "0.1.9.post2", "0.1.11", "0.1.11.dev3", "0.4.0", "junk"])
def test_other_versions_of_verifiers_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding.importlib.metadata, "version", lambda name: version)
    with pytest.raises(ValueError, match=re.escape(f"verifiers {version} has another interface: pip install")):
        load_environment("reverse-text")
    for good in ("0.1.9.post3", "0.1.10", "0.1.10.post1"):
        monkeypatch.setattr(finding.importlib.metadata, "version", lambda name, good=good: good)
        finding.check_verifiers()


def test_signal_handlers_survive() -> None:
    def handler(number: int, frame: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, handler), signal.getsignal(signal.SIGINT)
    try:
        load_environment("reverse-text", SMALL)
        assert signal.getsignal(signal.SIGTERM) is handler and signal.getsignal(signal.SIGINT) is before[1]
    finally:
        signal.signal(signal.SIGTERM, before[0])


def test_loading_in_a_thread_is_refused_with_the_reason() -> None:
    errors: list[BaseException] = []

    def load() -> None:
        try:
            load_environment("reverse-text", SMALL)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    thread.join(timeout=60)
    assert "main thread" in str(errors[0])


def test_reverse_text_splits_are_disjoint() -> None:
    def texts(seed: int, split: str, **extra: Any) -> list[str]:
        rows = load_environment("reverse-text", {**SMALL, "num_eval_examples": 40, "seed": seed, **extra}).rows(split)
        return [row["prompt"][-1]["content"] for row in rows]

    assert texts(1, "train") == texts(1, "train") != texts(2, "train")
    train, held_out = {*texts(1, "train"), *texts(2, "train")}, {*texts(1, "eval"), *texts(2, "eval")}
    assert len(texts(1, "train")) == 20 and len(texts(1, "eval")) == 40 and not train & held_out
    assert all(4 <= len(t) <= 8 and t == t.strip() and "  " not in t for t in train | held_out)
    assert set("".join(texts(1, "train", alphabet="ab", max_length=12))) == {"a", "b"}


def test_reverse_text_prompts_and_rewards(reverse_text: Environment, engine: FakeEngine) -> None:
    row = reverse_text.rows()[0]
    assert [m["role"] for m in row["prompt"]] == ["system", "user"] and row["answer"] == row["prompt"][1]["content"][
        ::-1
    ]
    bare = load_environment("reverse-text", {**SMALL, "system_prompt": ""})
    assert [m["role"] for m in bare.rows()[0]["prompt"]] == ["user"]
    engine.reply = lambda body: "no tag"
    [rollout] = run_group(bare, engine, 1)
    assert (rollout.reward, rollout.metrics["exact_match"]) == (0.0, 0.0)
    engine.reply = lambda body: oracle(body).replace("</", "x</")
    [rollout] = run_group(bare, engine, 1)
    assert 0.8 < rollout.reward < 1.0 and rollout.metrics["exact_match"] == 0.0


def test_reverse_text_from_a_file_and_with_impossible_arguments(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(f'{{"prompt": "text {i}"}}' for i in range(10)))
    env = load_environment("reverse-text", {"dataset_name": str(path), "num_eval_examples": 3})
    assert len(env.rows()) == 7 and env.rows("eval")[-1]["answer"] == "9 txet"
    with pytest.raises(ValueError, match="fewer than 500 train texts"):
        load_environment(
            "reverse-text", {"alphabet": "ab", "min_length": 2, "max_length": 3, "num_train_examples": 500}
        )
    with pytest.raises(ValueError, match="need 1 <= min_length <= max_length"):
        load_environment("reverse-text", {"min_length": 9, "max_length": 3})


def rollout_of(*turns: Turn) -> Rollout:
    return Rollout(prompt="p", turns=list(turns), reward=0.5, temperature=0.9)


def test_turns_interleave_while_the_prefix_extends() -> None:
    """The worked example of `rollout_to_samples`."""
    samples = rollout_to_samples(
        rollout_of(
            Turn([1, 2], [3, 4], [-0.3, -0.4], [(0, 5), (1, 6)]),
            Turn([1, 2, 3, 4, 5], [6], [-0.6], [(0, 6)]),
            Turn([1, 2, 9], [7], [-0.7], [(0, 7)]),
            Turn([1, 2, 3, 4, 5, 6, 8], [2], [-0.2], [(0, 7)]),
        )
    )
    assert [s.tokens for s in samples] == [[1, 2, 3, 4, 5, 6, 8, 2], [1, 2, 9, 7]]
    assert [s.loss_mask for s in samples] == [[0, 0, 1, 1, 0, 1, 0, 1], [0, 0, 0, 1]]
    assert [s.inference_logprobs for s in samples] == [[0, 0, -0.3, -0.4, 0, -0.6, 0, -0.2], [0, 0, 0, -0.7]]
    assert [s.versions for s in samples] == [[(2, 5), (3, 6), (7, 7)], [(3, 7)]]


def test_branches_have_the_request_of_their_first_turn() -> None:
    """Turns that continue a conversation as tokens have none of their own."""
    request, other = {"messages": [{"role": "user", "content": "a"}]}, {"prompt": "b"}
    turns = [
        Turn([1, 2], [3], [-0.3], chat_request=request),
        Turn([8], [9], [-0.9], chat_request=other),
        Turn([1, 2, 3, 4], [5], [-0.5]),
        Turn([1, 2, 3, 6], [7], [-0.7]),
        Turn([1, 2, 3, 6, 5], [3], [-0.7], seat="b"),
        Turn([1, 2, 4], [3], [-0.7]),
    ]
    samples = rollout_to_samples(rollout_of(*turns))
    assert [(s.tokens, s.metadata.get("chat_request")) for s in samples] == [
        ([1, 2, 3, 4, 5], request),
        ([8, 9], other),
        ([1, 2, 3, 6, 7], request),
        ([1, 2, 3, 6, 5, 3], None),
        ([1, 2, 4, 3], None),
    ]


tokens = st.lists(st.integers(0, 3), max_size=4)


@given(st.lists(st.tuples(st.booleans(), tokens, tokens), min_size=1, max_size=6))
def test_tokens_and_logprobs_always_align(plan: list[tuple[bool, list[int], list[int]]]) -> None:
    """For any turns, every sampled token appears exactly once, with its log-prob and version."""
    turns, history, counter = [], list[int](), itertools.count(1)
    for extends, given_ids, sampled in plan:
        prompt = [*history, *given_ids] if extends else [9, *given_ids]
        numbers = [next(counter) for _ in sampled]
        turns.append(Turn(prompt, sampled, [-float(n) for n in numbers], [(0, numbers[0])] if numbers else []))
        history = [*prompt, *sampled]
    samples = rollout_to_samples(rollout_of(*turns))
    expected = {
        -lp: (token, list(turn.prompt_ids))
        for turn in turns
        for lp, token in zip(turn.logprobs, turn.completion_ids, strict=True)
    }
    seen: dict[float, int] = {}
    for sample in samples:
        sample.validate()
        assert sample.inference_logprobs is not None
        for token, mask, logprob in zip(sample.tokens, sample.loss_mask, sample.inference_logprobs, strict=True):
            assert (mask == 1.0) == (logprob != 0.0)
            if mask:
                seen[-logprob] = token
        starts = [start for start, _ in sample.versions]
        assert starts == sorted(set(starts)) and all(sample.loss_mask[start] for start in starts)
    assert seen == {number: token for number, (token, _) in expected.items()}


def test_logprobs_that_do_not_fit_their_tokens() -> None:
    with pytest.raises(ValueError, match="turn 1 has 2 sampled tokens but 1 log-probs"):
        rollout_to_samples(rollout_of(Turn([1], [2, 3], [-1.0])))
