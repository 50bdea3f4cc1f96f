"""Agents against a scripted server, and conversion to samples; under both event loops."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from fake_engine import FakeEngine, free_port, serve
from small_tokenizers import CHATML, build_tokenizer

from prime_rl.runtime.tokenizer import load_tokenizer
from rollouts.agents import Agent, ChatAgent, Endpoint, Trajectory, Turn
from rollouts.training.agent_integration import (
    agent_rollout_to_sample,
    generate_rollout_batch,
    trajectory_to_sample,
)
from rollouts.training.datasets import DataBuffer
from rollouts.training.datasets.chat import render_chat
from rollouts.training.rollout_gen import AsyncRolloutManager
from rollouts.training.types import RolloutConfig, Sample, Status

both_loops = pytest.mark.parametrize("loop", ["asyncio", "trio"])


def run(loop: str, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    async def main() -> Any:
        with anyio.fail_after(30):
            return await function(*arguments)

    return anyio.run(main, backend=loop)


def shout(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"].upper()


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


class Countdown:
    """An environment of two replies; the second one is async, to show that it may be."""

    def __init__(self) -> None:
        self.left = 2

    def respond(self, messages: list[dict[str, Any]]) -> Any:
        self.left -= 1
        reply = [{"role": "user", "content": f"left {self.left}"}] if self.left >= 0 else []
        if self.left:
            return reply

        async def later() -> list[dict[str, Any]]:
            await anyio.sleep(0)
            return reply

        return later()


@both_loops
def test_one_turn(loop: str) -> None:
    with serve(FakeEngine(shout, version=3)) as engine:
        endpoint = Endpoint("m", engine.base_url, temperature=0.7, max_tokens=10, extra_body={"top_p": 0.9})
        agent: Agent = ChatAgent(endpoint, judge=lambda done: done.text == "HI")
        trajectory = run(loop, agent.rollout, "hi")
    assert trajectory.text == "HI" and trajectory.correct is True and trajectory.status == Status.COMPLETED
    assert trajectory.prompt_tokens == ids("u:hi;") and trajectory.response_tokens == ids("HI")
    assert trajectory.tokens == ids("u:hi;HI") and trajectory.stop_reason == "stop"
    (request,) = engine.requests
    assert request == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.7,
        "max_tokens": 10,
        "logprobs": True,
        "return_token_ids": True,
        "top_p": 0.9,
    }
    sample = trajectory_to_sample(trajectory, tokenizer=None, metadata={"id": 7})
    assert sample.tokens == ids("u:hi;HI") and sample.loss_mask == [0.0] * 5 + [1.0] * 2
    assert sample.inference_logprobs == [0.0] * 5 + [-0.5, -1.5] and sample.versions == [(5, 3)]
    assert sample.metadata == {"id": 7, "correct": True} and sample.temperature == 0.7 and sample.response == "HI"


@both_loops
def test_a_judge_may_be_async(loop: str) -> None:
    class Silent(Endpoint):
        async def chat(self, messages: Any, **options: Any) -> dict[str, Any]:
            return {"choices": [{"message": {"role": "assistant", "content": "no"}, "finish_reason": "stop"}]}

    async def judge(done: Trajectory) -> bool:
        await anyio.sleep(0)
        return done.text == "yes"

    assert run(loop, ChatAgent(Silent("m"), judge=judge).rollout, "hi").correct is False


@both_loops
def test_non_prefix_turns_are_refused(loop: str) -> None:
    """The fake closes earlier turns with a semicolon that it never sampled: a template that is not prefix-stable."""
    with serve(FakeEngine(shout)) as engine:
        trajectory = run(loop, ChatAgent(Endpoint("m", engine.base_url), Countdown).rollout, "hi")
        with pytest.raises(ValueError, match=r"has 3 token sequences: .*prefix-stable"):
            run(loop, agent_rollout_to_sample, "hi", Countdown, Endpoint("m", engine.base_url), None)
    assert [m["content"] for m in trajectory.messages] == ["hi", "HI", "left 1", "LEFT 1", "left 0", "LEFT 0"]
    assert trajectory.text == "HI\nLEFT 1\nLEFT 0" and len(trajectory.turns) == 3


def test_turns_have_seeds_of_their_own() -> None:
    with serve(FakeEngine(shout)) as engine:
        agent = ChatAgent(Endpoint("m", engine.base_url), Countdown)
        for _ in range(2):
            anyio.run(partial(agent.rollout, "hi", seed=7))
    seeds = [request["seed"] for request in engine.requests]
    assert seeds[:3] == seeds[3:] and seeds[0] == 7 and len(set(seeds)) == 3


def test_turns_that_extend_each_other_are_one_sample() -> None:
    turns = [Turn([1, 2], [3, 4], [-0.1, -0.2], [(0, 5)]), Turn([1, 2, 3, 4, 9], [6], [-0.3], [(0, 6)])]
    sample = trajectory_to_sample(
        Trajectory(prompt="p", turns=turns, messages=[{"role": "user", "content": "p"}]), None
    )
    assert sample.tokens == [1, 2, 3, 4, 9, 6] and sample.loss_mask == [0, 0, 1, 1, 0, 1]
    assert sample.inference_logprobs == [0, 0, -0.1, -0.2, 0, -0.3] and sample.versions == [(2, 5), (5, 6)]


def test_tokenizer_is_used_without_server_token_ids() -> None:
    tokenizer = load_tokenizer("tiny-qwen3")
    with serve(FakeEngine(shout)) as engine:
        endpoint = Endpoint("m", engine.base_url, token_ids=False)
        sample = run("asyncio", agent_rollout_to_sample, "hi", Countdown, endpoint, tokenizer)
    assert "return_token_ids" not in engine.requests[0]
    learned = [token for token, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask]
    assert tokenizer.decode(learned) == "HI<|im_end|>LEFT 1<|im_end|>LEFT 0<|im_end|>"
    assert sample.inference_logprobs is None and sample.status == Status.COMPLETED


@pytest.mark.parametrize(("stop_reason", "learned"), [("length", "cut of"), ("stop", "cut of<|im_end|>")])
def test_a_cut_answer_is_not_trained_to_end(stop_reason: str, learned: str) -> None:
    tokenizer = load_tokenizer("tiny-qwen3")
    messages = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "cut of"}]
    trajectory = Trajectory(prompt="p", messages=messages, num_prompt_messages=1, stop_reason=stop_reason)
    sample = trajectory_to_sample(trajectory, tokenizer)
    tokens = [token for token, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask]
    assert tokenizer.decode(tokens) == learned and len(sample.tokens) == len(sample.loss_mask)


class Calculator:
    """An environment of one turn with a tool."""

    tools = (
        {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}},
    )

    def respond(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return []


def test_a_rendered_prompt_has_the_tools_of_the_request() -> None:
    tokenizer = load_tokenizer("tiny-qwen3")
    with serve(FakeEngine(shout)) as engine:
        endpoint = Endpoint("m", engine.base_url, token_ids=False)
        sample = run("asyncio", agent_rollout_to_sample, "hi", Calculator, endpoint, tokenizer)
    [body] = engine.requests
    assert body["tools"] == list(Calculator.tools)
    prompt = render_chat(tokenizer, body["messages"], body["tools"])
    assert sample.tokens[: sample.loss_mask.index(1.0)] == prompt and "add()" in tokenizer.decode(prompt)


def test_rollouts_fail_whose_text_the_template_drops() -> None:
    """Templates such as Llama 3.1's write no text beside calls: the sample would lack what was generated."""

    class Caller(Endpoint):
        async def chat(self, messages: Any, **options: Any) -> dict[str, Any]:
            call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
            message = {"role": "assistant", "content": messages[0]["content"], "tool_calls": [call]}
            return {"choices": [{"message": message, "finish_reason": "tool_calls"}]}

    written = "(message.tool_calls | string if message.tool_calls else message.content)"
    tokenizer = load_tokenizer("tiny-qwen3", CHATML.replace("message.content", written))
    samples = run("asyncio", generate_rollout_batch, [" ", "I add"], None, Caller("m"), tokenizer, 10, [{}, {"i": 1}])
    assert [s.status for s in samples] == [Status.COMPLETED, Status.FAILED] and samples[1].metadata == {"i": 1}
    assert (samples[1].error or "").startswith("the chat template drops the text beside tool calls in `content`")


@pytest.mark.parametrize(("token_ids", "reason"), [(True, "no sampled tokens"), (False, "no text or tool call")])
def test_empty_answers_fail_alone(token_ids: bool, reason: str) -> None:
    tokenizer = load_tokenizer("tiny-qwen3")
    with serve(FakeEngine(lambda body: shout(body).strip("B"))) as engine:
        endpoint = Endpoint("m", engine.base_url, token_ids=token_ids)
        samples = run("asyncio", generate_rollout_batch, ["a", "b"], None, endpoint, tokenizer)
    assert [s.status for s in samples] == [Status.COMPLETED, Status.FAILED] and reason in (samples[1].error or "")


def test_rollouts_fail_whose_text_merges_with_the_prompt(tmp_path: Path) -> None:
    """As with Qwen 2.5, whose prompt ends with a line break: one more, and both are one token."""
    specials, named = ["<|im_start|>", "<|im_end|>"], {"eos_token": "<|im_end|>"}
    tokenizer = build_tokenizer(tmp_path, CHATML, specials, ["\n\n"], named)
    with serve(FakeEngine(shout)) as engine:
        endpoint = Endpoint("m", engine.base_url, token_ids=False)
        samples = run("asyncio", generate_rollout_batch, ["a", "\nb"], None, endpoint, tokenizer)
    assert [s.status for s in samples] == [Status.COMPLETED, Status.FAILED]
    assert (samples[1].error or "").startswith("message 1 begins with white space that merges")


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_rendered_answers_have_their_reasoning(key: str) -> None:
    """`reasoning` is the name of vLLM and OpenRouter; templates read the other one."""
    written = (
        "('<think>' + message.reasoning_content + '</think>' if message.reasoning_content else '') + message.content"
    )
    tokenizer = load_tokenizer("tiny-qwen3", CHATML.replace("message.content", f"({written})"))
    messages = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "b", key: "a"}]
    sample = trajectory_to_sample(Trajectory(prompt="p", messages=messages, num_prompt_messages=1), tokenizer)
    tokens = [token for token, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask]
    assert tokenizer.decode(tokens) == "<think>a</think>b<|im_end|>"


def test_an_empty_list_of_calls_is_not_sent_back() -> None:
    """As vLLM returns it, and OpenAI and the template of Llama 3 refuse it."""

    class Plain(Endpoint):
        async def chat(self, messages: Any, **options: Any) -> dict[str, Any]:
            message = {"role": "assistant", "content": "no", "tool_calls": [], "refusal": None}
            return {"choices": [{"message": message, "finish_reason": "stop"}]}

    trajectory = run("asyncio", ChatAgent(Plain("m"), Countdown).rollout, "hi")
    assert [m for m in trajectory.messages if m["role"] == "assistant"] == [{"role": "assistant", "content": "no"}] * 3


def test_it_ends_at_the_last_turn_and_at_the_length() -> None:
    with serve(FakeEngine(shout)) as engine:
        endpoint = Endpoint("m", engine.base_url, extra_body={"max_completion_tokens": 2})
        cut = run("asyncio", ChatAgent(endpoint, Countdown, system_prompt="s").rollout, "hello")
        last = run("asyncio", ChatAgent(Endpoint("m", engine.base_url), Countdown, max_turns=2).rollout, "hello")
    assert (cut.text, cut.status, cut.stop_reason, len(cut.turns)) == ("HE", Status.TRUNCATED, "length", 1)
    assert cut.messages[0] == {"role": "system", "content": "s"}
    assert (last.status, last.stop_reason, len(last.turns)) == (Status.TRUNCATED, "max_turns", 2)


@both_loops
def test_batch_keeps_prompt_order_and_records_failures(loop: str) -> None:
    with serve(FakeEngine(shout, fail=lambda body: 500 if body["messages"][0]["content"] == "b" else None)) as engine:
        endpoint = Endpoint("m", engine.base_url)
        rows = [{"i": i} for i in range(3)]
        samples = run(loop, generate_rollout_batch, ["a", "b", "c"], None, endpoint, None, 10, rows)
        with pytest.raises(ValueError, match="1 entries for 2 prompts"):
            run(loop, generate_rollout_batch, ["a", "b"], None, endpoint, None, 10, [{}])
        with pytest.raises(ValueError, match="3 token sequences"):
            run(loop, generate_rollout_batch, ["a"], Countdown, endpoint, None)
    assert [s.response for s in samples] == ["A", "", "C"] and [s.metadata["i"] for s in samples] == [0, 1, 2]
    assert samples[1].status == Status.FAILED and "returned status 500: " in (samples[1].error or "")


def test_unreachable_server_sets_status_failed() -> None:
    trajectory = run("asyncio", ChatAgent(Endpoint("m", f"http://127.0.0.1:{free_port()}/v1")).rollout, "hi")
    assert trajectory.status == Status.FAILED and "ConnectError" in trajectory.error and not trajectory.turns
    with pytest.raises(ValueError, match="the trajectory failed"):
        trajectory_to_sample(trajectory, None)


def test_an_aborted_completion_is_a_failure() -> None:
    with serve(FakeEngine(shout, finish_reason="abort")) as engine:
        trajectory = run("asyncio", ChatAgent(Endpoint("m", engine.base_url)).rollout, "hi")
    assert trajectory.status == Status.FAILED and "aborted the completion" in trajectory.error and not trajectory.turns


def test_a_slow_server_is_left_after_the_timeout() -> None:
    with serve(FakeEngine(shout, latency_s=5)) as engine:
        trajectory = run("asyncio", ChatAgent(Endpoint("m", engine.base_url, timeout_s=0.2)).rollout, "hi")
    assert trajectory.error is not None and trajectory.error.endswith("timed out after 0.2 s")


@both_loops
def test_an_agent_inside_the_rollout_manager(loop: str) -> None:
    """What fails once is tried again; seeds reach the server."""
    failed: list[str] = []

    def fail(body: dict[str, Any]) -> int | None:
        prompt = body["messages"][0]["content"]
        if prompt in failed:
            return None
        failed.append(prompt)
        return 503

    with serve(FakeEngine(shout, fail=fail)) as engine:
        endpoint = Endpoint("m", engine.base_url)

        async def generate_fn(prompts: list[str], seed: int) -> list[Sample]:
            return [await agent_rollout_to_sample(p, None, endpoint, None, seed=seed) for p in prompts]

        manager = AsyncRolloutManager(DataBuffer(["a", "b"]), RolloutConfig(2, 2, generate_fn=generate_fn))
        batch = run(loop, manager.generate_batch)
    assert [s.response for s in batch.samples] == ["A", "A", "B", "B"] and batch.group_indices == [0, 0, 1, 1]
    seeds = {request["seed"] for request in engine.requests}
    assert len(seeds) == 4


def test_engine_tokens_match_the_template() -> None:
    """Three turns of a random model that likes few letters: server tokens and rendered messages give one sample."""
    from running_server import RunningServer

    tokenizer = load_tokenizer("tiny-qwen3")
    end = tokenizer.eos_token_id
    bias = {str(tokenizer.encode(c, add_special_tokens=False)[0]): 30 for c in "abc"} | {str(end): 29}
    server = RunningServer(None)
    try:
        endpoint = Endpoint("tiny-qwen3", f"{server.root}/v1", max_tokens=200, extra_body={"logit_bias": bias})
        agent = ChatAgent(endpoint, Countdown, system_prompt="s")
        first, again = (run(loop, lambda: agent.rollout("hi", seed=5)) for loop in ("asyncio", "trio"))
    finally:
        server.stop()
    assert first == again and len(first.turns) == 3 and first.status == Status.COMPLETED, first.error
    assert set(first.text) <= set("abc\n") and len(first.text) > 5
    reported = trajectory_to_sample(first, None)
    first.turns = []
    rendered = trajectory_to_sample(first, tokenizer)
    assert reported.tokens == rendered.tokens and reported.loss_mask == rendered.loss_mask
    assert reported.inference_logprobs is not None and rendered.inference_logprobs is None
    assert [p < 0 for p in reported.inference_logprobs] == [m > 0 for m in reported.loss_mask]
    assert reported.versions == [(reported.loss_mask.index(1), 0)]


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="'localhost' of an endpoint must begin with http"):
        Endpoint("m", "localhost")
    with pytest.raises(ValueError, match="must not set temperature: set it as an argument"):
        Endpoint("m", extra_body={"temperature": 0.7})  # trajectories would have another temperature
    with pytest.raises(ValueError, match="max_turns 0"):
        ChatAgent(Endpoint("m"), max_turns=0)
    for empty in ("", []):
        with pytest.raises(ValueError, match="the prompt is empty"):
            anyio.run(ChatAgent(Endpoint("m")).rollout, empty)
    assert "secret" not in repr(Endpoint("m", api_key="secret"))
