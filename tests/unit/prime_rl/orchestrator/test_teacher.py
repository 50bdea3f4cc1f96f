"""The teacher: its prompt, its log-probs against a plain transformers forward, and samples it cannot score."""

from __future__ import annotations

import contextlib
import shutil
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import anyio
import httpx
import openai
import pytest
import torch
from running_server import RunningServer
from small_tokenizers import SMOLLM2
from teacher_group import roll_out

from prime_rl.client.scoring import FULL, ScoredTokens, TokenScorer
from prime_rl.configuration.sections import ClientConfig
from prime_rl.inference.config import InferenceConfig
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.distillation.context import (
    SYSTEM_PROBE,
    ContextProvider,
    build_source,
    fill_template,
    first_user_text,
    insert_context,
    read_default_system,
)
from prime_rl.orchestrator.distillation.inspect_contexts import inspect_contexts
from prime_rl.orchestrator.distillation.teacher import Teacher, build_teacher
from prime_rl.orchestrator.setup import Orchestrator, build_orchestrator
from prime_rl.runtime.tokenizer import load_tokenizer, resolve_model_dir
from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.rl.config import LossConfig
from prime_rl.trainer.rl.data import apply_reference_regularization, check_batch
from prime_rl.trainer.rl.loss import build_loss, build_loss_schedule, measure_advantage_terms, measure_distance
from prime_rl.utils.client import InferenceClient, build_clients
from rollouts.training.batching import pack_samples
from rollouts.training.environments import load_environment
from rollouts.training.objectives import PRESETS, DistillChoice
from rollouts.training.rl_losses import LossInputs, compute_divergence, compute_sequence_kl_advantages, policy_loss
from rollouts.training.rl_losses.policy import extra_terms, mix_advantages
from rollouts.training.rollout_gen.async_rollout_manager import GroupDropped
from rollouts.training.rollout_gen.groups import DropReason
from rollouts.training.sampling_support import decode_supports
from rollouts.training.steps import publish_dir, step_path
from rollouts.training.types import UNFILTERED, Sample, TeacherTable

CONTEXT = "Answer with letters only, and keep it short.\n\n"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
USER = {"role": "user", "content": "What is next?"}
SYSTEM = {"role": "system", "content": "You are a clock."}


def count_calls() -> float:
    CALLS.append(1)
    return 1.0


CALLS: list[int] = []


def respond(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "And then?"}] if len(messages) < 5 else []


def criticize(state: dict[str, Any]) -> float:
    """Every second rollout succeeds; the others are told the context of all other tests."""
    CALLS.append(1)
    state["feedback"] = "" if len(CALLS) % 2 else CONTEXT
    return float(not state["feedback"])


def build_rows(system: bool = False, turns: int = 1, tools: bool = False, has_feedback: bool = False) -> dict[str, Any]:
    """An environment in plain Python, as a factory of the tests."""
    world: dict[str, Any] = {
        "dataset": [{"prompt": [SYSTEM, USER] if system else [USER], "info": {"hint": "7"}}],
        "rewards": criticize if has_feedback else count_calls,
        "tools": TOOLS if tools else None,
    }
    if turns > 1:
        world |= {"respond": lambda messages, row, state: respond(messages), "max_turns": turns}
    return world


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    server = RunningServer(None, max_num_batched_tokens=64)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def plain_model(server: RunningServer) -> Any:
    """The server's weights in transformers' own model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(resolve_model_dir("tiny-qwen3")))
    missing, _ = model.load_state_dict(dict(server.service.engine.engine.tensors()), strict=False)  # type: ignore[attr-defined]
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.float().eval()


def make_config(server: RunningServer, env: dict[str, Any] | None = None, **changes: Any) -> OrchestratorConfig:
    client = {"base_url": [f"{server.root}/v1"]}
    teacher = {"context": CONTEXT, "client": client, "model": {"name": "base"}, **changes.pop("teacher", {})}
    return OrchestratorConfig.model_validate(
        {
            "client": client,
            "model": {"name": "tiny-qwen3"},
            "teacher_model": teacher,
            "env": [{"id": "test_teacher:build_rows", "name": "rows", **(env or {})}],
            "batch_size": 2,
            "rollouts_per_example": 2,
            "sampling": {"max_tokens": 6},
            **changes,
        }
    )


def make_group(config: OrchestratorConfig, score: bool = True, **args: Any) -> tuple[list[Sample], Teacher]:
    """The samples of one group that went through environment, engine and teacher."""
    return roll_out(config, load_environment("test_teacher:build_rows", args, score=score))


@pytest.mark.parametrize(
    ("args", "context_position", "temperature"),
    [
        ({}, "user_prefix", 1.0),
        ({"system": True}, "user_prefix", 0.7),
        ({"system": True, "tools": True}, "system_append", 1.0),
        ({"turns": 3}, "user_prefix", 1.0),
        ({"turns": 2, "system": True, "tools": True}, "system_replace", 1.3),
        ({}, "message", 1.0),
    ],
)
def test_teacher_logprobs_match_forward_with_context(
    server: RunningServer, plain_model: Any, args: dict[str, Any], context_position: str, temperature: float
) -> None:
    config = make_config(
        server,
        teacher={"context_position": context_position, "top_logprobs": 3},
        # A turn ends by a token, sooner or later: one that is cut off has no next one.
        sampling={"max_tokens": 60, "temperature": temperature, "extra_body": {"stop_token_ids": [*range(0, 256, 3)]}},
    )
    samples, _ = make_group(config, **args)
    assert len(samples) == 2
    teacher_messages: list[dict[str, Any]] = [dict(USER)]
    if context_position == "user_prefix":
        teacher_messages[0]["content"] = CONTEXT + USER["content"]
    if context_position == "message":
        teacher_messages = [{"role": "user", "content": CONTEXT}, USER]
    if args.get("system"):
        content = {"user_prefix": SYSTEM["content"], "system_append": SYSTEM["content"] + CONTEXT}
        teacher_messages = [{"role": "system", "content": content.get(context_position, CONTEXT)}, *teacher_messages]
    tools = TOOLS if args.get("tools") else None
    tokenizer = load_tokenizer("tiny-qwen3")
    text = tokenizer.apply_chat_template(teacher_messages, tools=tools, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(str(text), add_special_tokens=False)
    for sample in samples:
        start = sample.loss_mask.index(1.0)
        ids = [*prompt, *sample.tokens[start:]]
        if args.get("turns", 1) > 1:
            assert 0.0 in sample.loss_mask[start:], "environment messages are between two turns"
        with torch.no_grad():
            table = torch.log_softmax(plain_model(torch.tensor([ids])).logits[0] / temperature, -1)
        assert sample.teacher_logprobs is not None and sample.teacher_table is not None
        top = array("f", sample.teacher_table.logprobs).tolist()
        tails = array("f", sample.teacher_table.tail_mass).tolist()
        row = 0
        for i, mask in enumerate(sample.loss_mask):
            if mask == 0:
                assert sample.teacher_logprobs[i] == 0
                continue
            there = table[len(prompt) + i - start - 1]
            assert sample.teacher_logprobs[i] == pytest.approx(float(there[sample.tokens[i]]), abs=1e-5)
            best = there.topk(3).values
            assert top[3 * row : 3 * row + 3] == pytest.approx(best.tolist(), abs=1e-5)
            assert tails[row] == pytest.approx(float(1 - best.exp().sum()), abs=1e-5)
            row += 1
        assert row * 3 == len(top)


TRUNCATED = {"max_tokens": 12, "top_p": 0.9, "top_k": 40, "min_p": 0.01}


def test_truncated_sampling_is_scored_over_its_supports(server: RunningServer) -> None:
    """A reference with the student's prompts and weights has the student's log-probs, to the bit."""
    samples, _ = make_group(make_config(server, env={"teacher": "reference"}, sampling=TRUNCATED), turns=3)
    for sample in samples:
        sizes = decode_supports(sample.sampling_support, len(sample.tokens)).sizes.tolist()
        assert [size > 0 for size in sizes] == [mask > 0 for mask in sample.loss_mask] and max(sizes) <= 40
        assert sample.teacher_logprobs == sample.inference_logprobs


def test_rollouts_without_requested_supports_fail(server: RunningServer) -> None:
    lost = {**TRUNCATED, "extra_body": {"return_sampling_support": False}}
    with pytest.raises(GroupDropped, match="all_failed"):
        make_group(make_config(server, sampling=lost))
    samples, _ = make_group(make_config(server, sampling=lost, sampling_support_replay=False))
    assert samples and not any(sample.sampling_support for sample in samples)


def test_context_prefix_is_cached(server: RunningServer) -> None:
    config = make_config(server, teacher={"context": "A long context. " * 20})
    _, teacher = make_group(config)
    first = teacher.take_metrics()["teacher/cached_prompt"]
    _, teacher = make_group(config)
    assert first > 0.4, "the second rollout of the group found what the first computed"
    assert teacher.take_metrics()["teacher/cached_prompt"] > 0.9


class PlainClient(InferenceClient):
    """Client of a server with the OpenAI API only."""

    async def request_scores(self, body: dict[str, Any]) -> bytes | None:
        return None


@pytest.fixture(scope="module")
def smollm2_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A model whose template has a default system message."""
    directory = tmp_path_factory.mktemp("model") / "m"
    shutil.copytree(resolve_model_dir("tiny-qwen3"), directory)
    (directory / "chat_template.jinja").write_text(SMOLLM2)
    server = RunningServer(None, model_options={"name": str(directory)})
    yield server
    server.stop()


def read_prompts(server: RunningServer, context_position: str, chat: list[dict[str, Any]]) -> tuple[str, str]:
    """What student and teacher are given before the first sampled token."""
    model = {"name": server.config.model.name}
    config = make_config(
        server, teacher={"context": "C", "separator": "\n", "context_position": context_position}, model=model
    )
    seen: list[str] = []

    async def run() -> None:
        [client] = build_clients(config.client)
        teacher = build_teacher(config)
        assert teacher is not None
        decode = server.service.tokenizer.decode

        async def score(tokens: list[int], start: int, support: bytes) -> ScoredTokens:
            seen.append(decode(tokens[:start]))
            return ScoredTokens([0.0], 0)

        teacher.scorer.score = score  # type: ignore[method-assign]
        student = await client.tokenize({"model": teacher.model, "messages": chat})
        seen.append(decode(student))
        sample = Sample(prompt="", tokens=[*student, 99], loss_mask=[0.0] * len(student) + [1.0])
        sample.metadata = {"chat_request": {"messages": chat}}
        await teacher.score_group([sample], "rows", {}, client)
        assert teacher.last_error is None
        for opened in (client, *teacher.scorer.clients):
            await opened.close()

    anyio.run(run)
    return seen[0], seen[1]


@pytest.mark.parametrize("context_position", ["system_append", "user_prefix", "message"])
def test_default_system_message_is_kept(smollm2_server: RunningServer, context_position: str) -> None:
    student, teacher = read_prompts(smollm2_server, context_position, [USER])
    default = "You are a helpful AI assistant."
    added = {
        "system_append": (default, f"{default}\nC"),
        "user_prefix": (USER["content"], f"C\n{USER['content']}"),
        "message": ("<|im_start|>user", "<|im_start|>user\nC<|im_end|>\n<|im_start|>user"),
    }
    assert default in student and teacher == student.replace(*added[context_position], 1)


def test_context_appends_to_given_system_message(smollm2_server: RunningServer, server: RunningServer) -> None:
    student, teacher = read_prompts(smollm2_server, "system_append", [SYSTEM, USER])
    assert teacher == student.replace(SYSTEM["content"], SYSTEM["content"] + "\nC", 1)
    student, teacher = read_prompts(server, "system_append", [USER])
    assert teacher == "<|im_start|>system\nC<|im_end|>\n" + student, "this template has no default"


def test_inspected_prompts_include_default_system(smollm2_server: RunningServer) -> None:
    model = {"name": smollm2_server.config.model.name}
    teacher = {"context": "Cc", "separator": " ", "context_position": "system_append"}
    text = inspect_contexts(make_config(smollm2_server, teacher=teacher, model=model), 1, width=120)
    assert "You are a helpful AI assistant. Cc" in text and text.count("helpful AI assistant") == 2


@pytest.mark.parametrize(
    ("plain", "probed", "found"),
    [
        ("<s>D</s>u", f"<s>{SYSTEM_PROBE}</s>u", "D"),
        ("<h></h>u", f"<h>{SYSTEM_PROBE}</h>u", ""),
        ("u", f"<s>{SYSTEM_PROBE}</s>u", ""),
        ("<u>x", f"<u>{SYSTEM_PROBE}\n\nx", ""),
        ("<s>a", f"<s>{SYSTEM_PROBE}s>a", ""),
    ],
)
def test_reading_the_default_system_message(plain: str, probed: str, found: str) -> None:
    assert read_default_system(plain, probed) == found


def test_template_without_system_messages_raises() -> None:
    with pytest.raises(ValueError, match=r"drops system messages: set teacher_model\.context_position"):
        read_default_system("u", "u")


@pytest.mark.parametrize("top", [0, 3])
def test_any_prompt_logprobs_server_can_teach(server: RunningServer, top: int) -> None:
    tokens = [*b"what comes before, and after"]

    async def ask(
        kind: type[InferenceClient], temperature: float = 1.0, top: int = top, support: bytes = b""
    ) -> ScoredTokens:
        client = kind(f"{server.root}/v1")
        try:
            return await TokenScorer([client], "tiny-qwen3", temperature, top).score(tokens, 18, support)
        finally:
            await client.close()

    packed, plain = anyio.run(ask, InferenceClient), anyio.run(ask, PlainClient)
    assert len(plain.logprobs) == 10 and plain.logprobs == pytest.approx(packed.logprobs, abs=1e-5)
    assert plain.top == top and plain.top_ids == packed.top_ids
    for name in ("top_logprobs", "tail_mass") if top else ():
        one, other = (array("f", getattr(scored, name)).tolist() for scored in (packed, plain))
        assert other == pytest.approx(one, abs=1e-5)
    with pytest.raises(ValueError, match="scores the whole vocabulary only"):
        anyio.run(ask, PlainClient, 1.0, 0, UNFILTERED * 10)
    with pytest.raises(ValueError, match="temperature 1 only"):
        anyio.run(ask, PlainClient, 0.5)
    with pytest.raises(ValueError, match="whole distributions"):
        anyio.run(ask, PlainClient, 1.0, FULL)


def test_plain_text_prompts_with_teacher() -> None:
    config = OrchestratorConfig.model_validate({"teacher_model": {"context": "Hint. "}})
    assert config.teacher_model is not None
    contexts = ContextProvider(config.teacher_model, config.env, config.seed)
    assert contexts.insert("reverse-text", {"prompt": "Go on"}, "Hint. ") == {"prompt": "Hint. Go on"}


def test_overlong_teacher_prompts_are_dropped(server: RunningServer) -> None:
    config = make_config(server, teacher={"context": "x" * 3000})
    teacher = build_teacher(config)
    with pytest.raises(BaseException) as caught:
        make_group(config)
    assert isinstance(caught.value, GroupDropped)
    assert teacher is not None

    async def run() -> list[Sample]:
        [client] = build_clients(config.client)
        tokens = [*b"ab", 99]
        sample = Sample(
            prompt="", tokens=tokens, loss_mask=[0, 0, 1.0], metadata={"chat_request": {"messages": [USER]}}
        )
        has_teacher = await teacher.score_group([sample], "rows", {}, client)
        for opened in (client, *teacher.scorer.clients):
            await opened.close()
        return has_teacher

    assert anyio.run(run) == []
    assert teacher.take_metrics()["teacher/skipped/prompt"] == 1, "these tokens are not what the server renders"
    assert teacher.last_error is not None and "other tokens" in str(teacher.last_error)


def test_an_outage_of_the_teacher_is_no_error_of_the_prompt(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*args: Any) -> ScoredTokens:
        raise ConnectionError("gone")

    monkeypatch.setattr(TokenScorer, "score", fail)
    with pytest.raises(BaseException) as caught:
        make_group(make_config(server, teacher={"context": CONTEXT}))
    assert isinstance(caught.value, GroupDropped) and caught.value.reason == DropReason.ENGINE_ERROR


@pytest.mark.parametrize(("length", "skipped"), [(1600, None), (70_000, "overlong")])
def test_context_may_be_longer_than_the_window(length: int, skipped: str | None) -> None:
    """The student's server renders the teacher's prompt, which it scores beyond its window of generation."""
    server = RunningServer(None, model_options={"max_model_len": 48})
    config = make_config(server, teacher={"context": "x" * length}, sampling={"max_tokens": 2})
    [client], teacher = build_clients(config.client), build_teacher(config)
    assert teacher is not None

    async def run() -> list[Sample]:
        tokens = await client.tokenize({"model": "tiny-qwen3", "messages": [USER]})
        assert tokens is not None
        sample = Sample(prompt="", tokens=[*tokens, 99], loss_mask=[0.0] * len(tokens) + [1.0])
        sample.metadata = {"chat_request": {"messages": [USER]}}
        scored = await teacher.score_group([sample], "rows", {}, client)
        for opened in (client, *teacher.scorer.clients):
            await opened.close()
        return scored

    try:
        assert len(anyio.run(run)) == (skipped is None), teacher.last_error
        metrics = teacher.take_metrics()
        counts = {reason: metrics[f"teacher/skipped/{reason}"] for reason in ("overlong", "prompt", "server")}
        assert counts == {reason: float(reason == skipped) for reason in counts}, teacher.last_error
    finally:
        server.stop()


def test_feedback_of_a_rollout_is_its_teacher_context(server: RunningServer) -> None:
    CALLS.clear()
    expected, _ = make_group(make_config(server))
    CALLS.clear()
    told = {"context": None, "context_from": "feedback", "context_template": "{{feedback}}"}
    samples, teacher = make_group(make_config(server, teacher=told), has_feedback=True)
    assert sorted(sample.has_teacher for sample in samples) == [False, True] and len(CALLS) == 2
    for sample, other in zip(samples, expected, strict=True):
        assert sample.tokens == other.tokens and sample.has_teacher == (sample.reward == 0)
        assert sample.teacher_logprobs == (other.teacher_logprobs if sample.has_teacher else None)
    assert teacher.take_metrics()["teacher/with_context"] == 0.5


def test_skip_verification_runs_no_rewards(server: RunningServer) -> None:
    CALLS.clear()
    samples, _ = make_group(make_config(server, buffer={"skip_verification": True}), score=False)
    assert not CALLS and [sample.reward for sample in samples] == [0.0, 0.0]
    assert all(sample.teacher_logprobs is not None for sample in samples)
    make_group(make_config(server))
    assert CALLS, "else it does"


def test_environments_without_a_teacher_and_references(server: RunningServer) -> None:
    samples, _ = make_group(make_config(server, env={"teacher": "none"}))
    assert all(sample.teacher_logprobs is None and not sample.has_teacher for sample in samples)
    samples, _ = make_group(make_config(server, env={"teacher": "reference", "reference_weight": 2.0}))
    for sample in samples:
        assert sample.reference_weight == 2.0 and sample.inference_logprobs is not None
        assert sample.teacher_logprobs == pytest.approx(sample.inference_logprobs, abs=1e-5), "no context, same model"
    sample.advantages = [1.0] * len(sample.tokens)
    weighed = apply_reference_regularization([sample])[0]
    assert max(weighed.loss_mask) == 2.0 and not any(weighed.advantages or [1.0])


def test_context_positions() -> None:
    chat = [SYSTEM, USER, {"role": "assistant", "content": "Six."}, USER]
    prefixed = insert_context(chat, "C ", "user_prefix", "| ")
    assert [message["content"] for message in prefixed] == [
        "You are a clock.",
        "C | What is next?",
        "Six.",
        "What is next?",
    ]
    assert chat[1] == USER, "the student's own messages stay"
    assert insert_context(chat, "C", "system_append", "\n")[0]["content"] == "You are a clock.\nC"
    assert insert_context(chat, "C", "system_replace", "")[:2] == [{"role": "system", "content": "C"}, USER]
    assert insert_context([USER], "C", "system_append", "-")[0] == {"role": "system", "content": "C"}
    assert insert_context(chat, "C", "message", "")[1] == {"role": "user", "content": "C"}
    shots = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    assert insert_context(chat, shots, "user_prefix", "")[1:3] == shots
    orchestrator = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert first_user_text(insert_context(orchestrator, "C ", "user_prefix", "")) == "C Hi"
    with pytest.raises(ValueError, match="no user message"):
        insert_context([SYSTEM], "C", "user_prefix", "")


def test_developer_messages_are_system_messages() -> None:
    """A template that does not name their role is given them as such."""
    chat = [{"role": "developer", "content": "You are a clock."}, USER]
    appended = insert_context(chat, "C", "system_append", "\n", "default")
    assert appended == [{"role": "developer", "content": "You are a clock.\nC"}, USER]
    assert insert_context(chat, "C", "system_replace", "") == [{"role": "developer", "content": "C"}, USER]
    assert insert_context(chat, "C", "message", "") == [chat[0], {"role": "user", "content": "C"}, USER]


def give_hint(example: dict[str, Any], rng: Any) -> str | None:
    return f"{example['info']['hint']} {rng.random()}" if example["info"]["hint"] else None


def test_context_sources(tmp_path: Path) -> None:
    row = {"info": {"hint": "7"}, "example_id": 3}
    assert fill_template("It is {{example.info.hint}}, {{ example.example_id }}.", row, {}) == "It is 7, 3."
    assert fill_template("{{example.info.hint}}", {"info": '{"hint": 8}'}, {}) == "8"
    with pytest.raises(ValueError, match=r"no info\.clue \(available: hint\)"):
        fill_template("{{example.info.clue}}", row, {})
    assert fill_template("{{example.steps}}", {"steps": ["Größe", {"a": None}]}, {}) == '["Größe", {"a": null}]'
    with pytest.raises(ValueError, match=r"info\.hint of this row is null"):
        fill_template("{{example.info.hint}}", {"info": {"hint": None}}, {})
    (tmp_path / "c.md").write_text("from a file\n")
    config = OrchestratorConfig.model_validate(
        {
            "teacher_model": {"context_file": tmp_path / "c.md"},
            "env": [{"id": "a", "context_fn": "test_teacher:give_hint"}, {"id": "b"}, {"id": "c", "context": "own"}],
        }
    )
    assert config.teacher_model is not None
    contexts = ContextProvider(config.teacher_model, config.env, config.seed)
    assert contexts.context_for("b", row) == "from a file\n" and contexts.context_for("c", row) == "own"
    assert str(contexts.context_for("a", row)).startswith("7 ") and contexts.context_for(
        "a", row
    ) == contexts.context_for("a", row)
    assert contexts.context_for("a", {"info": {"hint": ""}}) is None
    assert len(contexts.warnings()) == 1 and "env c ends with 'n'" in contexts.warnings()[0]
    with pytest.raises(ValueError, match="cannot be imported"):
        build_source(config.teacher_model.model_copy(update={"context_file": None, "context_fn": "no:where"}), 0)


def test_a_failing_context_function_is_named_before_rollouts() -> None:
    config = OrchestratorConfig.model_validate({"teacher_model": {"context_fn": "test_teacher:give_hint"}})
    assert config.teacher_model is not None
    contexts = ContextProvider(config.teacher_model, config.env, 0)
    rows = [{"example_id": 0, "info": {"hint": "7"}}, {"example_id": 1, "info": {}}]
    contexts.check_rows("reverse-text", rows[:1], "m")
    with pytest.raises(ValueError, match=r"^context_fn test_teacher:give_hint failed on example 1: KeyError: 'hint'$"):
        contexts.check_rows("reverse-text", rows, "m")


def test_context_files_are_utf8_with_or_without_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "c.md"
    config = OrchestratorConfig.model_validate({"teacher_model": {"context_file": path}}).teacher_model
    assert config is not None
    path.write_bytes("\ufeffRäder\n".encode())
    source = build_source(config, 0)
    assert source is not None and source({}, None, ()) == "Räder\n"
    path.write_text("\n")
    with pytest.raises(ValueError, match=r"context_file .*c\.md is empty: write the context into it"):
        build_source(config, 0)
    path.write_bytes("Räder\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"context_file .*c\.md is not text in UTF-8: save it in this encoding"):
        build_source(config, 0)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"teacher_model": {"context": "a", "context_file": "b"}}, "both set the context"),
        ({"teacher_model": {"context": " \n"}}, "context is empty: write one"),
        ({"teacher_model": {}, "env": [{"id": "a", "context": ""}]}, 'has none with teacher = "reference"'),
        ({"teacher_model": {"eval_baseline": True}}, r"\[orchestrator.eval\]"),
        ({"env": [{"id": "a", "context": "b"}]}, "there is no teacher"),
        ({"teacher_model": {}, "env": [{"id": "a", "context": "b", "teacher": "reference"}]}, "remove one of them"),
    ],
)
def test_invalid_teacher_config_raises(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OrchestratorConfig.model_validate(config)


@pytest.mark.parametrize(("url", "is_shared"), [("http://127.0.0.1:1/v1", True), ("http://127.0.0.1:2/v1", False)])
def test_only_own_servers_of_a_teacher_are_waited_for(url: str, is_shared: bool, tmp_path: Path) -> None:
    """The student's servers are supervised by their pool, of which some may be missing."""
    client = {"base_url": ["http://127.0.0.1:1/v1"], "reconnect_timeout": 0}
    own = {"context": "C\n", "client": {"base_url": [url], "reconnect_timeout": 0}}
    own |= {"weights": "live" if is_shared else "frozen"}
    values = {"env": [{"id": "rows"}], "client": client, "teacher_model": own, "output_dir": tmp_path}
    config = OrchestratorConfig.model_validate(values)
    anything, rows = MagicMock(), load_environment("reverse-text", {"num_train_examples": 2})
    teacher = build_orchestrator(config, {"rows": rows}, {}, [anything], [anything], anything, anything).teacher
    assert teacher is not None
    assert (teacher.scorer.servers is not None) == (teacher.reference.servers is not None) == is_shared
    with contextlib.nullcontext() if is_shared else pytest.raises(TimeoutError):
        anyio.run(teacher.wait_until_ready, 0.05, anything)


SCORED = {"teacher_logprobs": [0.0, -1.0]}
TOP_1 = TeacherTable(1, bytes(4), bytes(4), bytes(4))


@pytest.mark.parametrize(
    ("scores", "same_top", "changed_top"),
    [
        ({}, None, 0),
        (SCORED, 0, None),
        (SCORED, 0, 1),
        (SCORED | {"teacher_table": TOP_1}, 1, 2),
        (SCORED | {"teacher_table": TOP_1}, 0, -1),
        (SCORED | {"teacher_table": TeacherTable(2, bytes(8))}, -1, 2),
    ],
)
def test_a_resume_regenerates_groups_that_do_not_fit(
    scores: dict[str, Any], same_top: int | None, changed_top: int | None, tmp_path: Path
) -> None:
    """Finished groups of a checkpoint have the scores of the teacher and the estimator before; None: no teacher."""
    url = {"base_url": ["http://127.0.0.1:2/v1"]}
    values: dict[str, Any] = {
        "env": [{"id": "rows"}],
        "output_dir": tmp_path,
        "ckpt": {"interval": 1, "resume_step": -1},
    }
    anything, rows = MagicMock(), load_environment("reverse-text", {"num_train_examples": 2})

    def build(top: int | None) -> Orchestrator:
        own = {} if top is None else {"teacher_model": {"client": url, "top_logprobs": top}}
        config = OrchestratorConfig.model_validate(values | own)
        return build_orchestrator(config, {"rows": rows}, {}, [anything], [anything], anything, anything)

    before = build(None)
    sample = Sample(prompt="", tokens=[1, 2], loss_mask=[0.0, 1.0], group_index=0, index=0, **scores)
    before.rollouts.groups.draw(0)
    before.rollouts.groups.finish(0, [sample])
    before.rollouts.tokens.generated = 1
    before.rollouts.step_count = 1
    before.checkpoints.save(1, before.state)
    publish_dir(step_path(tmp_path / "checkpoints", 1) / "trainer", lambda directory: None)
    same, changed = (build(top).rollouts for top in (same_top, changed_top))
    assert list(same.groups.ready) == [0] and not same.groups.returned
    assert not changed.groups.ready and changed.groups.returned == {0: 0}
    changed.tokens.check(changed.ready_samples)


class ReversingTeacher(InferenceClient):
    """A server whose vocabulary is in another order."""

    async def detokenize(self, body: dict[str, Any]) -> str:
        return (await super().detokenize(body))[::-1]


class PlainTeacher(InferenceClient):
    """A server without /detokenize."""

    async def detokenize(self, body: dict[str, Any]) -> str:
        response = httpx.Response(404, request=httpx.Request("POST", "http://plain/detokenize"))
        raise openai.NotFoundError("no such route", response=response, body=None)


@pytest.mark.parametrize(
    ("kind", "is_refused"), [(InferenceClient, False), (PlainTeacher, False), (ReversingTeacher, True)]
)
def test_teachers_with_another_vocabulary_are_refused(
    server: RunningServer, kind: type[InferenceClient], is_refused: bool
) -> None:
    config = make_config(server)
    assert config.teacher_model is not None
    contexts = ContextProvider(config.teacher_model, config.env, 0)

    async def main() -> None:
        student, own = InferenceClient(f"{server.root}/v1"), kind(f"{server.root}/v1")
        try:
            await Teacher(contexts, TokenScorer([own], "base"), "tiny-qwen3").wait_until_ready(5, student)
        finally:
            await student.close()
            await own.close()

    message = r"teacher_model\.model\.name = 'base' has another tokenizer .* choose a teacher with the same vocabulary"
    with pytest.raises(ValueError, match=message) if is_refused else contextlib.nullcontext():
        anyio.run(main)


def test_unknown_model_of_a_teacher_is_named(server: RunningServer) -> None:
    contexts = ContextProvider(make_config(server).teacher_model, [], 0)

    async def main() -> None:
        client = InferenceClient(f"{server.root}/v1")
        try:
            await Teacher(contexts, TokenScorer([client], "other"), "tiny-qwen3").wait_until_ready(5, client)
        finally:
            await client.close()

    message = r"model 'other' is not served; available: 'tiny-qwen3'(.|\n)* set teacher_model\.model\.name"
    with pytest.raises(ValueError, match=message):
        anyio.run(main)


# The trainer's side


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Backend:
    values = {
        "model": {"name": "tiny-qwen3", "seq_len": 48, "debug": {"random_init": True}},
        "output_dir": tmp_path_factory.mktemp("trainer"),
        "log": {"file": False},
    }
    return build_backend(TrainConfig.model_validate(values))


def own_table(backend: Backend, sample: Sample, k: int | None, temperature: float) -> TeacherTable:
    """Log-probs of a sample's loss tokens under the model itself."""
    from prime_rl.trainer.models.attention import PackedAttention

    n = len(sample.tokens)
    with torch.no_grad():
        hidden = backend.model(torch.tensor(sample.tokens), torch.arange(n), PackedAttention([n]))
        table = torch.log_softmax(hidden @ backend.model.lm_head.weight.T / temperature, -1)
    rows = table[[i - 1 for i, mask in enumerate(sample.loss_mask) if mask > 0]]
    if k is None:
        return TeacherTable(rows.shape[1], array("f", rows.flatten().tolist()).tobytes())
    best = rows.topk(k)
    ids, values = array("i", best.indices.flatten().tolist()), array("f", best.values.flatten().tolist())
    tails = array("f", (1 - best.values.double().exp().sum(-1)).tolist())
    return TeacherTable(k, values.tobytes(), ids.tobytes(), tails.tobytes())


@pytest.mark.parametrize(("estimator", "k"), [("topk+tail", 5), ("full", None)])
def test_equal_student_and_teacher_give_zero_gradient(backend: Backend, estimator: str, k: int | None) -> None:
    """Distribution rows match their tokens for any packing, also with samples without a teacher."""
    samples = []
    for i, length in enumerate((7, 12, 5, 9)):
        tokens = [(31 * i + 7 * t) % 320 for t in range(length)]
        mask = [0.0, 0.0, *[float((t + i) % 3 > 0) for t in range(length - 2)]]
        sample = Sample(prompt="", tokens=tokens, loss_mask=mask, temperature=0.8, inference_logprobs=[-5.0] * length)
        sample.advantages = [0.0] * length
        if i == 2:
            sample.has_teacher = False
        else:
            sample.teacher_table = own_table(backend, sample, k, 0.8)
            sample.teacher_logprobs = [-5.0] * length
        samples.append(sample)
    config = LossConfig(adv_tau=0.0, teacher_tau=1.0, distill={"estimator": estimator, "k": k or 8})  # type: ignore[arg-type]
    check_batch(samples, config, 320)
    loss = build_loss(config, 48)
    for num_ranks in (1, 2):
        for [micro, *_] in pack_samples(samples, 48, num_ranks):
            output = loss(backend.compute_inputs(micro.to_tensors()))
            summary = output.stats.summary()
            assert summary["teacher_coverage/max"] < 0.1, "no token is likely; all others together do not count as one"
            assert summary["teacher_kl_reverse/max"] < 1e-5 and summary["loss_distill/max"] < 1e-5
            assert output.loss_sum.item() == pytest.approx(0.0, abs=1e-5)
    wrong = Sample(**{name: getattr(samples[0], name) for name in Sample.__struct_fields__})
    wrong.teacher_table = own_table(backend, samples[1], k, 0.8)
    with pytest.raises(ValueError, match="of a teacher's table has"):
        wrong.validate()


def test_student_table_has_the_logit_cap_of_logprobs(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.model, "config", replace(backend.model.config, logit_cap=0.1))
    tokens = [7 * t % 320 for t in range(12)]
    sample = Sample(prompt="", tokens=tokens, loss_mask=[0.0, *[1.0] * 11], inference_logprobs=[-5.0] * 12)
    sample.advantages, sample.teacher_logprobs = [0.0] * 12, [-5.0] * 12
    sample.teacher_table = own_table(backend, sample, None, 1.0)
    [[micro]] = pack_samples([sample], 48, 1)
    inputs = backend.compute_inputs(micro.to_tensors())
    table = inputs.student_table
    assert table is not None
    assert torch.allclose(table[range(11), tokens[1:]], inputs.trainer_logprobs, atol=1e-6)


def test_batch_with_wrong_teacher_table_raises() -> None:
    sample = Sample(prompt="", tokens=[1, 2], loss_mask=[0, 1.0], inference_logprobs=[0, -1], advantages=[0, 1])
    sample.teacher_logprobs = [0.0, -1.0]
    sampled = LossConfig(teacher_tau=1.0)
    check_batch([sample], sampled, 320)
    for estimator in ("topk+tail", "full"):
        config = LossConfig(teacher_tau=1.0, distill={"estimator": estimator})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="the teacher scored sampled tokens only"):
            check_batch([sample], config, 320)
    pending = Sample(prompt="", tokens=[1, 2], loss_mask=[0, 1.0], inference_logprobs=[0, -1], advantages=[0, 1])
    with pytest.raises(ValueError, match="1 of 2 samples have no teacher log-probs"):
        check_batch([sample, pending], sampled, 320)
    pending.has_teacher = False
    check_batch([sample, pending], sampled, 320)
    with pytest.raises(ValueError, match="the teacher scored sampled tokens only"):
        check_batch([pending, sample], config, 320)  # every sample is checked, not only the first
    auto = LossConfig(teacher_tau=1.0, distill={"estimator": "auto"})  # type: ignore[arg-type]
    narrow = Sample(**{name: getattr(sample, name) for name in Sample.__struct_fields__})
    narrow.teacher_table = TeacherTable(3, logprobs=bytes(12), ids=bytes(12), tail_mass=bytes(4))
    with pytest.raises(ValueError, match="the teacher scored 3 tokens per position"):
        check_batch([sample, narrow], auto, 320)


@pytest.mark.parametrize(
    ("estimator", "table"),
    [
        ("full", TeacherTable(384, array("f", [-6.0] * 384).tobytes())),
        ("topk+tail", TeacherTable(2, bytes(8), array("i", [5, 320]).tobytes(), bytes(4))),
    ],
)
def test_teacher_with_a_wider_vocabulary_is_refused(estimator: str, table: TeacherTable) -> None:
    sample = Sample(prompt="", tokens=[1, 2], loss_mask=[0, 1.0], inference_logprobs=[0, -1], advantages=[0, 1])
    sample.teacher_logprobs, sample.teacher_table = [0.0, -1.0], table
    config = LossConfig(teacher_tau=1.0, distill={"estimator": estimator, "k": 2})  # type: ignore[arg-type]
    check_batch([sample], config, 384)
    with pytest.raises(ValueError, match="another size than the student's 320, which"):
        check_batch([sample], config, 320)


def test_server_name_matches_log(tmp_path: Path) -> None:
    assert InferenceConfig().name == "inference"
    assert ClientConfig().base_url, "a student's client has an address by default, a teacher's has none"
    with pytest.raises(ValueError, match=r"teacher_model\.client\.base_url is unset"):
        build_teacher(OrchestratorConfig.model_validate({"teacher_model": {"context": "a "}}))


def test_annealed_taus() -> None:
    config = LossConfig(adv_tau=1.0, teacher_tau=1.0, student_tau=0.5, anneal={"after": 10, "steps": 20})  # type: ignore[arg-type]
    schedule = build_loss_schedule(config, 48)

    def taus(step: int) -> tuple[float, float, float]:
        objective = schedule.loss_for_step(step, [])[0].objective
        return objective.adv_tau, objective.teacher_tau, objective.student_tau

    assert taus(1) == taus(10) == (1.0, 1.0, 0.5)
    assert taus(20) == pytest.approx((1.0, 0.1, 0.05)), "the geometric middle"
    assert taus(30) == taus(99) == pytest.approx((1.0, 0.01, 0.005))
    gone = LossConfig(teacher_tau=1.0, anneal={"after": 0, "steps": 4, "factor": 0.0})  # type: ignore[arg-type]
    assert build_loss_schedule(gone, 48).loss_for_step(4, [])[0].objective.teacher_tau == 0.0
    with pytest.raises(ValueError, match="decays teacher_tau but it is 0"):
        LossConfig(anneal={})  # type: ignore[arg-type]


def scored_sample(student: list[float], teacher: list[float], **more: Any) -> Sample:
    """A sample of one prompt token and these log-probs."""
    n = len(student)
    sample = Sample(prompt="", tokens=[5] * (n + 1), loss_mask=[0.0, *[1.0] * n], **more)
    sample.inference_logprobs, sample.teacher_logprobs = [0.0, *student], [0.0, *teacher]
    sample.advantages = [0.0, *[1.0] * n]
    return sample


def test_taus_annealed_to_measured_ratio() -> None:
    """A margin of 2: a reward of 1 is at last worth twice the nats of the farthest batch, resumed or not."""
    anneal = {"after": 0, "steps": 2, "margin": 2.0}
    config = LossConfig(adv_tau=1.0, teacher_tau=1.0, student_tau=0.5, anneal=anneal)  # type: ignore[arg-type]
    schedule = build_loss_schedule(config, 48)
    far, near = scored_sample([-1.0, -1.0], [-9.0, -3.0]), scored_sample([-1.0], [-1.0])
    reference = scored_sample([0.0], [-99.0], reference_weight=1.0)
    assert measure_distance([far, near, reference]) == 5.0 and measure_distance([Sample(prompt="")]) is None
    first, stats = schedule.loss_for_step(1, [far, near, reference])
    assert first.objective.student_tau == pytest.approx(0.5 * (1 / (0.5 * 2 * 5.0)) ** 0.5), "half way, in logarithms"
    assert stats["teacher/seq_kl"] == 5.0 and stats["adv/teacher_tau"] == first.objective.teacher_tau
    last = schedule.loss_for_step(3, [near])[0].objective
    assert last.adv_tau / last.student_tau == pytest.approx(2 * 5.0) and last.teacher_tau == 2 * last.student_tau
    resumed = build_loss_schedule(config, 48, schedule.progress)
    assert resumed.loss_for_step(3, [near])[0].objective == last
    pulls = measure_advantage_terms([far, reference], replace(last, adv_tau=3.0, teacher_tau=1.0, student_tau=2.0))
    assert pulls == {"adv/reward_abs": 3.0, "adv/teacher_abs": (7 + 1) / 2, "adv/teacher_tau": 1.0}
    for wrong, words in (({**anneal, "factor": 0.1}, "remove one"), (anneal, "compares adv_tau")):
        with pytest.raises(ValueError, match=words):
            LossConfig(adv_tau=0.0, teacher_tau=1.0, anneal=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ["token", "reward_to_go", "full"])
def test_reference_loss_is_independent_of_taus(estimator: str) -> None:
    """The loss of reference samples is independent of the taus, and 0 where student and teacher agree."""
    found = {}
    for tau in (1.0, 0.01) if estimator == "full" else (1.0, 0.01, 0.0):
        taus = {"adv_tau": 1.0, "teacher_tau": tau, "student_tau": 2 * tau}
        aim = replace(PRESETS["aipo"], distill=DistillChoice(estimator), **taus)  # type: ignore[arg-type]
        samples = [scored_sample([-1.0, -2.0], [-3.0, -1.5], group_index=i, reference_weight=1.0 - i) for i in range(2)]
        samples = compute_sequence_kl_advantages(apply_reference_regularization(samples), aim)
        [[micro]] = pack_samples(samples, 8)
        batch = micro.to_tensors()
        table = torch.log_softmax(torch.arange(6.0 * len(batch.labels)).view(-1, 6).sin(), -1)
        inputs = LossInputs(
            trainer_logprobs=batch.inference_logprobs.clone().requires_grad_(),
            inference_logprobs=batch.inference_logprobs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            sequence=batch.sequence,
            teacher_logprobs=batch.teacher_logprobs,
            is_reference=batch.is_reference,
            student_table=table,
            teacher_table=table.flip(-1),
        )
        assert batch.is_reference is not None and batch.is_reference.tolist() == [
            i == 0 for i in batch.sequence.tolist()
        ]
        is_reference = batch.is_reference & (batch.loss_mask > 0)
        if estimator == "full":
            terms = extra_terms(inputs, aim)["loss_distill"]
            assert torch.allclose(terms[is_reference], compute_divergence(table, table.flip(-1))[is_reference])
        else:
            terms = mix_advantages(inputs, aim)
        found[tau] = terms[is_reference].tolist(), terms[~batch.is_reference & (batch.loss_mask > 0)].tolist()
        if estimator == "token":
            assert found[tau][0] == pytest.approx([-2.0, 0.5]), "the teacher's log-prob less the student's"
        assert "reference_kl/mean" in policy_loss(inputs, aim).stats.summary()
    assert all(reference == pytest.approx(found[1.0][0]) for reference, _ in found.values())
    assert found[1.0][1] != pytest.approx(found[0.01][1])


def test_references_may_be_the_only_use_of_the_teacher() -> None:
    reference, plain = scored_sample([-1.0], [-2.0], reference_weight=1.0), scored_sample([-1.0], [])
    plain.has_teacher, plain.teacher_logprobs = False, None
    check_batch([reference, plain], LossConfig(), 320)
    with pytest.raises(ValueError, match=r"set trainer\.loss\.teacher_tau above 0"):
        check_batch([reference, scored_sample([-1.0], [-2.0])], LossConfig(), 320)


@pytest.mark.parametrize(("has_topk", "chosen"), [(True, ("topk+tail", "adaptive")), (False, ("token", "reverse"))])
def test_auto_estimator_depends_on_the_teacher(has_topk: bool, chosen: tuple[str, str]) -> None:
    sample = Sample(prompt="", tokens=[5, 7, 8, 9], loss_mask=[0, 1.0, 1.0, 1.0], inference_logprobs=[0, -1, -1, -1])
    sample.advantages, sample.teacher_logprobs = [0.0] * 4, [0.0, -1.0, -1.0, -1.0]
    if has_topk:
        ids = array("i", [7, 0, 8, 0, 9, 0]).tobytes()
        sample.teacher_table = TeacherTable(2, array("f", [-1.0] * 6).tobytes(), ids, array("f", [0.3] * 3).tobytes())
    without = Sample(prompt="", tokens=[5], loss_mask=[1.0], inference_logprobs=[0.0], has_teacher=False)
    without.advantages = [1.0]
    options = {"estimator": "auto", "k": 2, "gate": "positive"}
    config = LossConfig(teacher_tau=1.0, distill=options)  # type: ignore[arg-type]
    check_batch([sample, without], config, 320)
    choice = build_loss_schedule(config, 48).loss_for_step(1, [sample, without])[0].objective.distill
    assert (choice.estimator, choice.direction) == chosen
    assert choice.gate == "positive"
