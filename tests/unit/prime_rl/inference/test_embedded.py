"""The embedded engine: bit-equal to the trainer for any batch; sampling depends on the seed only."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import queue
import random
import threading
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import build_smollm2
from token_filters import filter_logprobs
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers import models as token_models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from prime_rl.inference.detokenizer import MAX_CONTEXT, Detokenizer, StopStringMatcher, TokenNames, build_decode
from prime_rl.inference.embedded import engine as engine_module
from prime_rl.inference.embedded import prefix_cache, scheduler
from prime_rl.inference.embedded.attention import decode_metadata, find_runs
from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.embedded.kv_cache import BLOCK, zeros
from prime_rl.inference.embedded.prefix_cache import FIRST_SHARE, CachedPrefix, PrefixIndex
from prime_rl.inference.embedded.prompt_logprobs import PromptScorer
from prime_rl.inference.embedded.sampler import adjust_logits, build_sampling_batch, sample
from prime_rl.inference.embedded.scheduler import TOKENS_BESIDE_DECODING, ScheduledBatch
from prime_rl.inference.embedded.sequence import Sequence
from prime_rl.inference.engine import (
    FULL,
    AdapterSpec,
    BusyIntervalLogger,
    EngineFailed,
    EngineThread,
    Event,
    GenerationRequest,
    Output,
    SamplingParams,
    StreamUpdate,
    derive_seed,
)
from prime_rl.runtime import core_lease
from prime_rl.runtime.core_lease import CoreLease
from prime_rl.runtime.machine import SHARED_GPU_VARIABLE
from prime_rl.runtime.tokenizer import load_tokenizer, resolve_model_dir
from prime_rl.trainer.lora import LoraSpec, adapter_tensors, add_lora, peft_tensors
from prime_rl.trainer.models.attention import PackedAttention, RoundedAttention
from prime_rl.trainer.models.causal_lm import CausalLM, init_weights, tensor_names
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.models.registry import load_decoder, load_eos_ids
from rollouts.kernels import native
from rollouts.kernels.linear import linear
from rollouts.kernels.log_softmax import log_softmax
from rollouts.training.manifests import digest_tensor
from rollouts.training.numerics import using_threads
from rollouts.training.sampling import sample_tokens, uniform

MODEL_DIR = resolve_model_dir("tiny-qwen3")
TOKENIZER = load_tokenizer("tiny-qwen3")
DECODE = build_decode(TOKENIZER)


pytestmark = pytest.mark.usefixtures("one_thread")


def build_model(seed: int) -> CausalLM:
    """Random weights far enough from uniform that a wrong token shows."""
    model = load_decoder(MODEL_DIR, random_init=True, seed=seed)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.05)
    return model.requires_grad_(False)


def trainer_logprobs(
    model: CausalLM, tokens: list[int], temperature: float, kept: torch.dtype = torch.float32
) -> Tensor:
    """What the trainer computes for every next token: [tokens, vocab]; keys and values are `kept` in some format."""
    model.round_inputs(kept)
    attend = RoundedAttention(PackedAttention([len(tokens)], rounded=model.rounds_inputs), kept)
    with torch.no_grad():
        hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), attend)
        logits = linear(hidden, model.lm_head.weight, rounded=model.rounds_inputs)
        return log_softmax(logits.float() / torch.full((len(tokens), 1), temperature))


def request(prompt: list[int], **params: Any) -> GenerationRequest:
    stream = params.pop("stream", False)
    return GenerationRequest(prompt, SamplingParams(**{"max_tokens": 8, **params}), stream)


def run(engine: EmbeddedEngine, *requests: GenerationRequest) -> list[Output]:
    """Outputs in the order of the requests."""
    for one in requests:
        engine.add(one)
    outputs: dict[GenerationRequest, Output] = {}
    while engine.has_work():
        outputs |= {event.request: event for event in engine.step() if isinstance(event, Output)}
    return [outputs[one] for one in requests]


def check_exact(
    output: Output, models: dict[int, CausalLM], tolerance: float = 0.0, kept: torch.dtype = torch.float32
) -> int:
    """Every log-prob equals the trainer's under the version of its span; returns the number of tokens."""
    prompt, ids = output.request.prompt, output.token_ids
    ends = [start for start, _ in output.versions[1:]] + [len(ids)]
    for (start, version), end in zip(output.versions, ends, strict=True):
        expected = trainer_logprobs(models[version], prompt + ids, output.request.params.temperature, kept)
        rows = torch.arange(len(prompt) + start, len(prompt) + end) - 1
        held = torch.tensor(output.logprobs[start:end])
        torch.testing.assert_close(held, expected[rows, torch.tensor(ids[start:end])], rtol=0, atol=tolerance)
    return len(ids)


def test_cores_that_a_trainer_leaves_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MIN_PARAMETERS", 0)
    monkeypatch.setattr(core_lease, "num_cores", lambda: 2)
    requests = [request([i, *range(30)], max_tokens=6, seed=i) for i in range(5)]
    expected = run(EmbeddedEngine(build_model(0)), *requests)
    engine, used = EmbeddedEngine(build_model(0), lease=CoreLease(tmp_path)), list[int]()
    compute = engine._runner.run

    def record(batch: Any) -> Any:
        used.append(torch.get_num_threads())
        return compute(batch)

    monkeypatch.setattr(engine._runner, "run", record)
    for one in requests:
        engine.add(one)
    outputs: dict[GenerationRequest, Output] = {}
    with (tmp_path / "trainer").open("w") as trainer:
        while engine.has_work():
            fcntl.flock(trainer, fcntl.LOCK_UN if len(used) % 2 else fcntl.LOCK_EX)
            outputs |= {event.request: event for event in engine.step() if isinstance(event, Output)}
    assert used == [1, 2, 1, 2, 1, 2]
    for one, output in zip(requests, expected, strict=True):
        assert (outputs[one].token_ids, outputs[one].logprobs) == (output.token_ids, output.logprobs)


@pytest.mark.parametrize(
    ("seed", "longest", "num_requests", "threads"),
    # Two threads that wait for each other on busy cores may take a minute.
    [(0, 40, 32, 1), (1, 300, 32, 1), (2, 300, 32, 1), pytest.param(3, 250, 9, 2, marks=pytest.mark.slow)],
)
def test_logprobs_equal_the_trainers_bit_for_bit(seed: int, longest: int, num_requests: int, threads: int) -> None:
    """Random arrivals, batch sizes, chunk sizes, shared prompts, cancellations and two updates in flight."""
    torch.set_num_threads(threads)
    rng = random.Random(seed)
    models = {version: build_model(version) for version in range(3)}
    engine = EmbeddedEngine(
        build_model(0), max_running=rng.choice([3, 8, 24]), max_num_batched_tokens=rng.choice([16, 100, 2048])
    )
    shared = [[rng.randrange(256) for _ in range(rng.randint(1, longest))] for _ in range(3)]
    todo = [
        request(
            rng.choice(shared) if rng.random() < 0.5 else rng.choices(range(256), k=rng.randint(1, longest)),
            max_tokens=rng.randint(1, 40),
            temperature=rng.choice([1.0, 0.7, 1.3]),
            seed=i,
        )
        for i in range(num_requests)
    ]
    alive: list[GenerationRequest] = []
    outputs: list[Output] = []
    num_cancelled = 0
    while todo or engine.has_work():
        while todo and rng.random() < 0.5:
            alive.append(todo.pop())
            engine.add(alive[-1])
        if alive and num_cancelled < num_requests // 8 and rng.random() < 0.05:
            engine.cancel(alive.pop(rng.randrange(len(alive))))
            num_cancelled += 1
        if len(outputs) >= num_requests // 4 * (engine.version + 1) and engine.version < 2:
            version = engine.version + 1
            engine.load_weights(tensor_names(models[version]), version)
        new = [event for event in engine.step() if isinstance(event, Output)] if engine.has_work() else []
        outputs += new
        alive = [one for one in alive if all(one is not output.request for output in new)]
    assert len(outputs) == num_requests - num_cancelled
    assert any(len(output.versions) > 1 for output in outputs)
    assert sum(check_exact(output, models) for output in outputs) > 8 * num_requests
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.shared_prompt_tokens > 0


def test_fast_mode_keeps_the_cache_and_reports_version_spans() -> None:
    models = {version: build_model(version) for version in range(2)}
    engine = EmbeddedEngine(build_model(0), exact=False)
    engine.add(request(list(range(60)), max_tokens=10))
    events: list[Event] = []
    while engine.has_work():
        events += engine.step()
        if engine.stats().generated_tokens == 4 and engine.version == 0:
            engine.load_weights(tensor_names(models[1]), 1)
    (output,) = events
    assert isinstance(output, Output)
    assert output.versions == [(0, 0), (4, 1)]
    with pytest.raises(AssertionError):
        check_exact(output, models)
    # 1 prefill and 9 decode steps: nothing was recomputed.
    assert engine.stats().steps == 10


def test_a_prompt_is_not_shared_across_versions() -> None:
    models = {version: build_model(version) for version in range(2)}
    for exact in (True, False):
        engine = EmbeddedEngine(build_model(0), exact=exact)
        prompt = list(range(50))
        engine.add(request(prompt, max_tokens=30))
        for _ in range(3):
            engine.step()
        engine.load_weights(tensor_names(models[1]), 1)
        late = request(prompt, seed=5)
        (output,) = run(engine, late)
        assert output.versions == [(0, 1)]
        check_exact(output, models, 0.0 if exact else 1e-4)


@pytest.mark.parametrize("updates", [1, 3])
def test_keys_of_earlier_weights_are_not_kept(updates: int) -> None:
    """In fast mode a sequence goes on with them, but leaves none behind for later requests."""
    models = {version: build_model(version) for version in range(updates + 1)}
    engine = EmbeddedEngine(build_model(0), exact=False)
    prompt = list(range(50))
    engine.add(request(prompt, max_tokens=30))
    for version in range(1, updates + 1):
        engine.step()
        engine.step()
        engine.load_weights(tensor_names(models[version]), version)
    while engine.has_work():
        engine.step()
    (output,) = run(engine, request(prompt, seed=5))
    assert output.num_cached == 0 and output.versions == [(0, updates)]
    check_exact(output, models, 1e-4)
    (again,) = run(engine, request(prompt, seed=6))
    assert again.num_cached == len(prompt) - 1


def test_a_group_shares_its_prompt() -> None:
    engine = EmbeddedEngine(build_model(0))
    outputs = run(engine, *(request(list(range(40)), seed=i) for i in range(6)))
    assert engine.stats().shared_prompt_tokens == 5 * 39
    assert len({tuple(output.token_ids) for output in outputs}) > 1


@pytest.mark.parametrize("blocks", ["paged", "slots"])
@pytest.mark.parametrize("length", [40, BLOCK, 300])
def test_equal_prompts_are_computed_in_one_pass(length: int, blocks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if blocks == "slots":
        monkeypatch.setattr(native, "library", lambda: None)
    prompt = random.Random(length).choices(range(256), k=length)
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.5}, {"top_p": 0.5}, {"logit_bias": ((7, 5.0),)}, {}, {}]
    group = [request(prompt, seed=i, top_logprobs=2, **params) for i, params in enumerate(settings)]
    alone = [run(EmbeddedEngine(build_model(0)), one)[0] for one in group]
    engine = EmbeddedEngine(build_model(0))
    for one in group:
        engine.add(one)
    events = engine.step()
    stats = engine.stats()
    assert (stats.generated_tokens, stats.steps, stats.shared_prompt_tokens) == (6, 1, 5 * (length - 1))
    while engine.has_work():
        events += engine.step()
    together = {event.request: event for event in events if isinstance(event, Output)}
    for one in alone:
        other = together[one.request]
        assert (other.token_ids, other.logprobs) == (one.token_ids, one.logprobs)
        assert other.top_logprobs == one.top_logprobs
    (late,) = run(engine, request(prompt, seed=9))
    cached = [together[one].num_cached for one in group]
    assert cached == [0, *[late.num_cached] * 5], "reports do not depend on when a request came"


def test_groups_of_similar_prompts_are_computed_once_each() -> None:
    engine = EmbeddedEngine(build_model(0))
    run(engine, *(request([*range(40), last, 7], seed=seed, max_tokens=1) for last in range(3) for seed in range(4)))
    assert engine.stats().shared_prompt_tokens == 2 * 40 + 9 * 41, "the first of a group shares a part"
    assert engine.stats().steps == 2


def test_equal_prompts_with_other_wishes_are_computed_again() -> None:
    """Scores of a prompt need all its positions, and requests without new tokens have no use for its last one."""
    models, prompt = {0: build_model(0)}, list(range(40))
    wishes: list[dict[str, Any]] = [{}, {"prompt_logprobs": 1}, {"prompt_logprobs": 1, "max_tokens": 0}, {}]
    plain, scored, only_scored, other = run(
        EmbeddedEngine(build_model(0)), *(request(prompt, seed=i, **each) for i, each in enumerate(wishes))
    )
    for output in (plain, scored, other):
        assert check_exact(output, models) == 8
    assert only_scored.token_ids == [] and plain.prompt_logprobs is None
    assert scored.prompt_logprobs is not None and only_scored.prompt_logprobs is not None
    assert scored.prompt_logprobs.logprobs == only_scored.prompt_logprobs.logprobs


def test_a_seed_draws_the_same_alone_and_in_a_batch() -> None:
    rng = random.Random(3)
    requests = [request(rng.choices(range(256), k=rng.randint(1, 60)), max_tokens=20, seed=i) for i in range(12)]
    requests.append(request([1, 2, 3], seed=4, top_p=0.7, top_k=20, min_p=0.01, repetition_penalty=1.2, min_tokens=3))
    crowd = run(EmbeddedEngine(build_model(0), eos_ids=[5]), *requests)
    for one, together in zip(requests, crowd, strict=True):
        (alone,) = run(EmbeddedEngine(build_model(0), eos_ids=[5], max_running=1, max_num_batched_tokens=16), one)
        assert (alone.token_ids, alone.logprobs) == (together.token_ids, together.logprobs)
    twins = run(EmbeddedEngine(build_model(0)), *(request([7], seed=derive_seed(1, i)) for i in range(3)))
    assert len({tuple(output.token_ids) for output in twins}) == 3


def test_greedy_reports_logprob_at_temperature_one() -> None:
    model = build_model(0)
    (output,) = run(EmbeddedEngine(model), request([1, 2, 3], temperature=0.0, top_p=0.5))
    logprobs = trainer_logprobs(model, [1, 2, 3, *output.token_ids], 1.0)[2:-1]
    assert output.token_ids == logprobs.argmax(-1).tolist()
    assert output.logprobs == logprobs.max(-1).values.tolist()


def test_an_answer_ends_at_eos_at_stop_tokens_and_at_its_limits() -> None:
    (free,) = run(EmbeddedEngine(build_model(0)), request([9], max_tokens=12))
    ids = free.token_ids
    assert free.finish_reason == "length"
    assert len(ids) == 12
    first = next(i for i, token in enumerate(ids) if i > 2 and token not in ids[:i])
    engine = EmbeddedEngine(build_model(0), eos_ids=[ids[first]])
    by_eos, ignoring, by_token = run(
        engine,
        request([9], max_tokens=12),
        request([9], max_tokens=12, ignore_eos=True),
        request([9], max_tokens=12, ignore_eos=True, stop_token_ids=(ids[2],)),
    )
    assert (by_eos.token_ids, by_eos.finish_reason, by_eos.stop_reason) == (ids[: first + 1], "stop", None)
    assert ignoring.token_ids == ids
    end = ids.index(ids[2]) + 1
    assert (by_token.token_ids, by_token.stop_reason) == (ids[:end], ids[2])
    (late,) = run(engine, request([9], max_tokens=12, min_tokens=first + 3))
    assert ids[first] not in late.token_ids[: first + 3]
    assert len(late.token_ids) >= first + 3
    short = EmbeddedEngine(build_model(0), max_model_len=16)
    (cut,) = run(short, request([9] * 10, max_tokens=50))
    assert (len(cut.token_ids), cut.finish_reason) == (6, "length")
    with pytest.raises(ValueError, match="does not fit"):
        short.add(request([9] * 16))


@pytest.mark.parametrize("length", [1, 300])
def test_a_prompt_of_another_models_tokens_is_refused(length: int) -> None:
    engine = EmbeddedEngine(build_model(0))
    with pytest.raises(ValueError, match=f"token id {engine.vocab_size}, .* its tokenizer does not fit"):
        engine.add(request([9] * length + [engine.vocab_size]))
    assert not engine.has_work()


def test_end_tokens_beyond_the_vocabulary_have_no_effect() -> None:
    model = build_model(0)
    beyond = model.config.vocab_size
    (plain,) = run(EmbeddedEngine(model), request([9], min_tokens=2))
    (other,) = run(EmbeddedEngine(model, eos_ids=[beyond]), request([9], min_tokens=2, stop_token_ids=(beyond + 1,)))
    assert (other.token_ids, other.finish_reason) == (plain.token_ids, "length")


def test_stop_strings_end_the_text_and_keep_the_tokens() -> None:
    (free,) = run(EmbeddedEngine(build_model(0)), request([9], max_tokens=40, seed=2))
    text = DECODE(free.token_ids, True)
    at = next(i for i in range(4, len(text)) if text[i : i + 2].isascii() and text.find(text[i : i + 2]) == i)
    stop = text[at : at + 2]
    engine = EmbeddedEngine(build_model(0), decode=DECODE)
    ended, with_stop = run(
        engine,
        request([9], max_tokens=40, seed=2, stop=("never", stop)),
        request([9], max_tokens=40, seed=2, stop=(stop,), include_stop=True),
    )
    assert (ended.text, ended.stop_reason, ended.finish_reason) == (text[:at], stop, "stop")
    assert with_stop.text == text[: at + 2]
    assert DECODE(ended.token_ids, True).startswith(text[: at + 2])
    assert ended.token_ids == free.token_ids[: len(ended.token_ids)]


def test_streaming_brings_every_token_once() -> None:
    engine = EmbeddedEngine(build_model(0))
    engine.add(request([1, 2], max_tokens=6, stream=True, top_logprobs=3))
    events: list[Event] = []
    while engine.has_work():
        events += engine.step()
    *pieces, output = events
    assert isinstance(output, Output)
    assert [token for piece in pieces for token in piece.token_ids] == output.token_ids[:-1]
    assert [piece.start for piece in pieces if isinstance(piece, StreamUpdate)] == list(range(5))
    assert all(len(top) == 3 and top[0][1] >= top[2][1] for top in output.top_logprobs)


def test_groups_read_a_long_prompt_once_and_change_no_bit() -> None:
    rng, models = random.Random(5), {0: build_model(0)}
    prompts = [rng.choices(range(256), k=300), rng.choices(range(256), k=140)]
    prompts.append([*prompts[0][:200], *prompts[1][:60]])
    requests = [
        request(prompts[i // 5], max_tokens=rng.choice([10, 40]), seed=i, top_logprobs=i % 2) for i in range(15)
    ]
    engine, runs = EmbeddedEngine(build_model(0)), 0
    for one in requests:
        engine.add(one)
    outputs = []
    while engine.has_work():
        outputs += [event for event in engine.step() if isinstance(event, Output)]
        backend = engine._runner.batch.backend if engine._runner.batch else None
        runs += backend is not None and backend.metadata.num_shared_blocks > 0
    assert runs > 10
    assert sum(check_exact(output, models) for output in outputs) >= 150


def test_a_conversation_continues_its_last_turn() -> None:
    models, engine = {0: build_model(0)}, EmbeddedEngine(build_model(0))
    (first,) = run(engine, request(list(range(70)), max_tokens=30))
    before = engine.stats().prompt_tokens
    turn = [*range(70), *first.token_ids, 7, 7, 7]
    second, other = run(engine, request(turn, seed=3), request([*turn[:40], 9, *turn[41:]], seed=4))
    # The last token that was drawn has no keys yet.
    assert (second.num_cached, other.num_cached) == (99, 40)
    assert engine.stats().prompt_tokens - before == 2 * 103
    for output in (first, second, other):
        check_exact(output, models)
    engine.load_weights(tensor_names(models[0]), 1)
    (late,) = run(engine, request(turn, seed=3))
    assert late.num_cached == 0
    assert late.token_ids == second.token_ids


def test_what_is_kept_is_bounded_and_can_be_switched_off() -> None:
    engine = EmbeddedEngine(build_model(0), max_prefix_cache_tokens=100)
    for i in range(8):
        run(engine, request([i] * 40, max_tokens=4))
        assert engine.stats().cached_tokens <= 100
    alone = EmbeddedEngine(build_model(0), enable_prefix_caching=False)
    outputs = run(alone, *(request(list(range(40)), seed=i) for i in range(4)))
    assert [output.num_cached for output in outputs] == [0] * 4


def test_the_prefix_cache_grows_if_conversations_continue() -> None:
    engine = EmbeddedEngine(build_model(0), max_prefix_cache_tokens=32 * FIRST_SHARE)
    first, second = (run(engine, request([i] * 20, max_tokens=4))[0] for i in (1, 2))
    assert engine.stats().kept_tokens == 23, "one conversation is as large as the first part of the cache"
    (late,) = run(engine, request([1] * 20 + first.token_ids + [9] * 3, max_tokens=4))
    assert late.num_cached == 0, "it was evicted"
    for i in range(3, 6):
        run(engine, request([i] * 20, max_tokens=4))
    assert engine.stats().kept_tokens >= 4 * 23
    (late,) = run(engine, request([3] * 20 + [9] * 3, max_tokens=4))
    assert late.num_cached == 20 and second.num_cached == 0


def test_evicted_entries_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests a server has finished."""
    monkeypatch.setattr(prefix_cache, "MOST_EVICTED", 10)
    prefixes = PrefixIndex(32 * FIRST_SHARE)
    numbers = [[i] * 32 for i in range(100)]
    for tokens in numbers:
        prefixes.insert(CachedPrefix(tokens, 32, None))
    assert len(prefixes._evicted) == 10
    prefixes.find(numbers[-2], None)
    assert not prefixes._evicted and prefixes._limit == 32 * FIRST_SHARE
    for tokens in numbers:
        prefixes.insert(CachedPrefix([7, *tokens], 33, None))
    assert not prefixes._evicted


def test_short_memory_sends_requests_back_and_changes_no_answer() -> None:
    rng = random.Random(1)
    requests = [request([i] * rng.randint(1, 60), max_tokens=rng.choice([20, 100, 300]), seed=i) for i in range(24)]
    wide = run(EmbeddedEngine(build_model(0), max_model_len=512), *requests)
    engine = EmbeddedEngine(build_model(0), max_model_len=512, max_cache_tokens=128 * 14, max_prefix_cache_tokens=0)
    narrow = run(engine, *requests)
    assert engine.stats().preempted > 0
    assert engine.stats().cached_tokens == 0
    for one, other in zip(wide, narrow, strict=True):
        assert (one.token_ids, one.logprobs, one.versions) == (other.token_ids, other.logprobs, other.versions)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, []),
        ({"eos_token_id": 7}, None, [7]),
        ({"eos_token_id": 7}, {}, [7]),
        ({"eos_token_id": 7}, {"eos_token_id": [3, 4]}, [3, 4]),
        ({"eos_token_id": None}, {"temperature": 1}, []),
    ],
)
def test_tokens_that_end_an_answer(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, expected: list[int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_eos_ids(tmp_path) == expected


def test_end_token_of_the_tokenizer_where_no_config_names_one(tmp_path: Path) -> None:
    tokenizer = build_smollm2(tmp_path)
    assert tokenizer.eos_token == "<|im_end|>"
    assert load_eos_ids(tmp_path) == [tokenizer.eos_token_id]


def test_runs_of_shared_columns() -> None:
    tables = decode_metadata(np.full(5, 3 * BLOCK), np.array([0, 2, 1, 0, 3])).block_tables
    assert find_runs(tables[0]) == [(0, 3), (3, 5)]
    assert find_runs(tables[1]) == [(0, 2), (2, 3), (3, 5)]
    assert find_runs(tables[3]) == [(i, i + 1) for i in range(5)]


def test_memory_is_reserved_for_running_sequences_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EmbeddedEngine(build_model(0), max_running=2)
    blocks, reserved = engine._blocks, []
    reserve = blocks.reserve
    monkeypatch.setattr(blocks, "reserve", lambda seqs, *rows: reserved.append(len(seqs)) or reserve(seqs, *rows))
    for seed in range(6):
        engine.add(request([1, 2, 3], max_tokens=2 + seed, seed=seed))
    while engine.has_work():
        engine.step()
    assert max(reserved) == 2


def test_preempted_sequence_is_recomputed() -> None:
    rng, models = random.Random(1), {0: build_model(0)}
    todo = [
        request(rng.choices(range(256), k=rng.randint(1, 60)), max_tokens=rng.choice([8, 100, 250]), seed=i)
        for i in range(30)
    ]
    engine = EmbeddedEngine(
        build_model(0), max_model_len=512, max_running=16, max_cache_tokens=128 * 18, max_prefix_cache_tokens=0
    )
    outputs: list[Output] = []
    while todo or engine.has_work():
        while todo and rng.random() < 0.6:
            engine.add(todo.pop())
        outputs += [event for event in engine.step() if isinstance(event, Output)] if engine.has_work() else []
    assert engine.stats().preempted > 10
    assert sum(check_exact(output, models) for output in outputs) > 1000


def test_the_cache_leaves_memory_of_a_shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EmbeddedEngine(build_model(0))
    engine._decoder.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4000 * engine._token_bytes, 0))
    assert engine._default_cache_tokens(256) == 3000
    monkeypatch.setenv(SHARED_GPU_VARIABLE, "1")
    assert engine._default_cache_tokens(256) == 1000


def test_growing_sequence_preempts_newer_ones() -> None:
    engine = EmbeddedEngine(build_model(0), max_model_len=512, max_cache_tokens=1, max_prefix_cache_tokens=0)
    num_blocks = engine.max_cache_tokens // 128  # the least that one sequence needs
    grown = request(random.Random(0).choices(range(256), k=375), max_tokens=60, seed=0)
    short = [request([i, i, i], max_tokens=40, seed=i) for i in range(1, num_blocks - 2)]
    outputs = run(engine, grown, *short)
    assert engine.stats().preempted > 0 and len(outputs[0].token_ids) == 60
    assert sum(check_exact(output, {0: build_model(0)}) for output in outputs) == 60 + 40 * len(short)


@pytest.mark.parametrize(("budget", "max_wait_s"), [(None, 0.0), (200, 0.0), (None, 1e9)])
def test_decoding_goes_on_beside_long_prompts(
    budget: int | None, max_wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two tokens there is one pass, of few tokens of the prompts, or there are those of `MAX_WAIT_S`."""
    monkeypatch.setattr(scheduler, "MAX_WAIT_S", max_wait_s)
    engine = EmbeddedEngine(build_model(0), max_num_batched_tokens=budget)
    passes, compute = list[int](), engine._runner.run

    def record(batch: ScheduledBatch) -> Any:
        passes.append(0 if batch.as_rows else sum(chunk.length for chunk in batch.chunks))
        return compute(batch)

    monkeypatch.setattr(engine._runner, "run", record)
    rng = random.Random(0)
    short = [request([i] * 5, max_tokens=30 + i, seed=i, stream=True) for i in range(3)]
    long = [request(rng.choices(range(256), k=length), max_tokens=2, seed=9) for length in (1800, 700, 800)]
    for one in short:
        engine.add(one)
    for _ in range(5):
        engine.step()
    passes.clear()
    for one in long:
        engine.add(one)
    outputs, has_tokens = list[Output](), list[bool]()
    while engine.has_work():
        events = engine.step()
        if not outputs:
            has_tokens.append(any(isinstance(event, StreamUpdate) for event in events))
        outputs += [event for event in events if isinstance(event, Output)]
    waits = [length > 0 for length in passes[: len(has_tokens)]]
    assert waits[:-1] == [not found for found in has_tokens[:-1]], "in the last step the first output ends"
    assert max(passes) == (budget or TOKENS_BESIDE_DECODING)
    assert ((True, True) in itertools.pairwise(waits)) == (max_wait_s > 0)
    assert sum(check_exact(output, {0: build_model(0)}) for output in outputs) == 30 + 31 + 32 + 3 * 2


@pytest.mark.parametrize("budget", [16, 2048])
def test_a_prompt_is_scored_as_the_trainer_scores_it(budget: int) -> None:
    model, prompt = build_model(0), random.Random(0).choices(range(256), k=150)
    expected = trainer_logprobs(model, prompt, 0.7)[:-1]
    target_value = expected.gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1).tolist()
    engine = EmbeddedEngine(build_model(0), max_num_batched_tokens=budget)
    scored, plain, full = run(
        engine,
        request(prompt, max_tokens=0, prompt_logprobs=5, prompt_temperature=0.7),
        request(prompt, max_tokens=3, prompt_logprobs=0),
        request(prompt, max_tokens=1, prompt_logprobs=FULL, prompt_temperature=0.7),
    )
    assert (scored.token_ids, scored.finish_reason, len(plain.token_ids)) == ([], "length", 3)
    assert scored.prompt_logprobs is not None
    assert plain.prompt_logprobs is not None
    assert full.prompt_logprobs is not None
    assert scored.prompt_logprobs.logprobs == target_value
    assert torch.equal(full.prompt_logprobs.full, expected)
    assert plain.prompt_logprobs.tail_mass == [1.0] * 149
    for top, tail, row in zip(
        scored.prompt_logprobs.top_logprobs, scored.prompt_logprobs.tail_mass, expected, strict=True
    ):
        assert [value for _, value in top] == row.topk(5).values.tolist()
        assert tail == pytest.approx(1 - row.exp().topk(5).values.double().sum().item(), abs=1e-6)


def test_distributions_leave_the_gpu_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copied.append(tensor) or tensor)
    scorer, logprobs = PromptScorer(FULL, 1.0), torch.randn(4, 50).log_softmax(-1)
    scorer._add(logprobs, [7] * 4)
    assert len(copied) == 1 and torch.equal(scorer.result().full, logprobs)


@pytest.mark.parametrize("gap", [10, 18, 24, 30])
def test_tail_mass_of_a_certain_token(gap: int) -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    logits[:, 7] += gap
    scorer = PromptScorer(8, 1.0)
    scorer._add(logits.log_softmax(-1), [7] * 4)  # in fp32 of a GPU, the log-prob of the token is 0 from 18 on
    expected = logits.double().softmax(-1).sort(descending=True).values[:, 8:].sum(-1)
    assert scorer.tail_mass == pytest.approx(expected.tolist(), rel=1e-5)


def test_tail_mass_has_the_same_bits_in_any_chunk() -> None:
    logprobs = (3 * torch.randn(8, 150_000, generator=torch.Generator().manual_seed(0))).log_softmax(-1)
    whole, alone = PromptScorer(8, 1.0), PromptScorer(8, 1.0)
    with using_threads(2):  # which share the sum of a single row
        whole._add(logprobs, [7] * 8)
        for row in logprobs:
            alone._add(row[None], [7])
    assert whole.tail_mass == alone.tail_mass


@pytest.mark.parametrize("budget", [16, 2048])
def test_what_comes_before_the_scored_tokens_is_computed_once(budget: int) -> None:
    """Prompts with one context share its keys; an update in flight scores everything again."""
    models = [build_model(seed) for seed in (0, 1)]
    rng = random.Random(0)
    context = rng.choices(range(256), k=100)
    prompts = [context + rng.choices(range(256), k=length) for length in (30, 3, 17)]
    engine = EmbeddedEngine(build_model(0), max_num_batched_tokens=budget)
    target_value = [request(prompt, max_tokens=0, prompt_logprobs=2, prompt_start=101) for prompt in prompts]
    outputs = run(engine, *target_value)

    def check(version: int) -> None:
        for prompt, output in zip(prompts, outputs, strict=True):
            expected = trainer_logprobs(models[version], prompt, 1.0)[100:-1]
            scores = output.prompt_logprobs
            assert scores is not None and len(scores.top_logprobs) == len(prompt) - 101
            held = torch.tensor(scores.logprobs)
            torch.testing.assert_close(held, expected.gather(1, torch.tensor(prompt[101:])[:, None])[:, 0])

    check(0)
    assert outputs[0].num_cached == 0 and min(output.num_cached for output in outputs[1:]) >= 96
    late = [replace(one, params=replace(one.params)) for one in target_value]
    engine.load_weights(dict(tensor_names(models[1])), 1)
    for one in late:
        engine.add(one)
    early = engine.step()
    engine.load_weights(dict(tensor_names(models[0])), 2)
    engine.load_weights(dict(tensor_names(models[1])), 3)
    received = {event.request: event for event in early if isinstance(event, Output)}
    while engine.has_work():
        received |= {event.request: event for event in engine.step() if isinstance(event, Output)}
    outputs = [received[one] for one in late]
    check(1)
    with pytest.raises(ValueError, match="prompt_start 130 must be"):
        engine.check(request(prompts[0], max_tokens=0, prompt_logprobs=0, prompt_start=130))
    assert engine.max_score_len > len(prompts[0])


def build_adapter(seed: int, rank: int = 4) -> tuple[CausalLM, dict[str, Tensor]]:
    """A model with an adapter that shows, and the adapter's tensors."""
    model = build_model(0)
    add_lora(model, LoraSpec(rank, 8.0), seed)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in adapter_tensors(model).values():
            tensor.copy_(torch.randn(tensor.shape, generator=noise) * 0.2)
    return model, {name: tensor.clone() for name, tensor in peft_tensors(model).items()}


def build_experts(seed: int) -> CausalLM:
    """A small Qwen3-MoE."""
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    model = CausalLM(DecoderConfig.from_hf(config))
    init_weights(model, seed)
    return model.requires_grad_(False)


def test_experts_are_served_as_they_are_trained() -> None:
    rng, models = random.Random(2), {version: build_experts(version) for version in range(2)}
    engine = EmbeddedEngine(build_experts(0), max_num_batched_tokens=64)
    for i in range(10):
        engine.add(request(rng.choices(range(256), k=rng.randint(1, 60)), max_tokens=12, seed=i))
    for _ in range(8):
        assert not any(isinstance(event, Output) for event in engine.step())
    engine.load_weights(tensor_names(models[1]), 1)
    outputs: list[Output] = []
    while engine.has_work():
        outputs += [event for event in engine.step() if isinstance(event, Output)]
    assert sum(check_exact(output, models) for output in outputs) == 120


def test_concurrent_adapters_match_their_trainers() -> None:
    trained = {name: build_adapter(seed) for seed, name in enumerate("abc", start=1)}
    engine = EmbeddedEngine(build_model(0), max_num_batched_tokens=64, speculation=False)
    for version, name in enumerate("ab"):
        digests = engine.load_adapter(name, trained[name][1], AdapterSpec(4, 8.0, version))
        assert digests == {key: digest_tensor(tensor) for key, tensor in trained[name][1].items()}
    prompt = list(range(50))
    requests = [
        GenerationRequest(prompt[: 50 - i], SamplingParams(max_tokens=20, seed=i), adapter=(None, "a", "b")[i % 3])
        for i in range(9)
    ]
    outputs = run(engine, *requests)
    models = {None: build_model(0)} | {name: model for name, (model, _) in trained.items()}
    for output in outputs:
        version = output.versions[0][1]
        check_exact(output, {version: models[output.request.adapter]})
    # Replaced while it runs: the rest of the answer is the new one's, all of it as its trainer computes it.
    one = replace(requests[1], params=SamplingParams(max_tokens=20, seed=1))
    engine.add(one)
    for _ in range(6):
        engine.step()
    engine.load_adapter("a", trained["c"][1], AdapterSpec(4, 8.0, 7))
    events: list[Event] = []
    while engine.has_work():
        events += engine.step()
    (output,) = events
    assert isinstance(output, Output)
    assert [version for _, version in output.versions] == [0, 7]
    check_exact(output, {0: models["a"], 7: models["c"]})
    engine.add(requests[2])
    engine.step()
    (aborted,) = engine.remove_adapter("b")
    assert isinstance(aborted, Output)
    assert aborted.finish_reason == "abort"
    assert list(engine.adapters()) == ["a"]
    with pytest.raises(ValueError, match="no adapter 'b'"):
        engine.add(requests[2])
    with pytest.raises(ValueError, match="lm_head"):
        engine.load_adapter("w", {"base_model.model.lm_head.weight": torch.zeros(2, 2)}, AdapterSpec(4, 8.0))


@pytest.mark.parametrize("preempts", [False, True])
def test_keys_of_an_earlier_adapter_are_not_shared(preempts: bool) -> None:
    """In fast mode neither by a request without keys yet, nor by one that computes its keys again."""
    (old, before), (new, after) = (build_adapter(seed) for seed in (1, 2))
    engine = EmbeddedEngine(build_model(0), exact=False, max_num_batched_tokens=64)
    engine.load_adapter("a", before, AdapterSpec(4, 8.0, 0))
    kept, *others, late = (
        GenerationRequest(prompt, SamplingParams(max_tokens=8, seed=1), adapter="a")
        for prompt in (list(range(50)), list(range(100, 200)), list(range(200, 256)), list(range(51)))
    )
    run(engine, kept)
    for one in (*others, late):
        engine.add(one)
    engine.step()
    seq = engine._sequences[late]
    while preempts and seq.num_generated < 2:
        engine.step()
    engine.load_adapter("a", after, AdapterSpec(4, 8.0, 1))
    assert bool(seq.num_cached) == preempts
    if preempts:
        engine._scheduler._preempt(seq)
    events: list[Event] = []
    while engine.has_work():
        events += engine.step()
    output = next(event for event in events if event.request is late)
    assert isinstance(output, Output)
    assert [version for _, version in output.versions] == ([0, 1] if preempts else [1])
    check_exact(output, {0: old, 1: new}, 1e-4)


def test_an_adapter_may_have_an_end_token_of_its_own() -> None:
    adapter, params = build_adapter(1)[1], SamplingParams(max_tokens=20, seed=1)
    engine = EmbeddedEngine(build_model(0))
    engine.load_adapter("plain", adapter, AdapterSpec(4, 8.0))
    [whole] = run(engine, GenerationRequest([1, 2, 3], params, adapter="plain"))
    end = frozenset(whole.token_ids[5:6])
    engine.load_adapter("chat", adapter, AdapterSpec(4, 8.0, eos_ids=end))
    [ended] = run(engine, GenerationRequest([1, 2, 3], params, adapter="chat"))
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(*end) + 1] and ended.finish_reason == "stop"
    [free] = run(engine, GenerationRequest([1, 2, 3], replace(params, ignore_eos=True), adapter="chat"))
    [base] = run(engine, GenerationRequest([1, 2, 3], replace(params, max_tokens=100)))
    assert free.token_ids == whole.token_ids and base.finish_reason == "length"


def test_an_adapter_of_the_output_layer_changes_its_own_rows() -> None:
    text = (MODEL_DIR / "config.json").read_text()
    config = replace(DecoderConfig.from_hf(json.loads(text)), tie_word_embeddings=False)
    draw = torch.Generator().manual_seed(1)
    a, b = torch.randn(4, config.hidden_size, generator=draw), torch.randn(config.vocab_size, 4, generator=draw) / 10
    tensors = {f"base_model.model.lm_head.lora_{kind}.weight": matrix for kind, matrix in (("A", a), ("B", b))}

    def generate(*requests: GenerationRequest) -> list[list[float]]:
        model = CausalLM(config)
        init_weights(model, 0)
        engine = EmbeddedEngine(model.requires_grad_(False))
        engine.load_adapter("head", tensors, AdapterSpec(4, 8.0))
        return [output.logprobs for output in sorted(run(engine, *requests), key=lambda output: output.request.prompt)]

    requests = [
        GenerationRequest([1, 2, i], SamplingParams(max_tokens=4, seed=i), adapter=(None, "head")[i % 2])
        for i in range(4)
    ]
    together = generate(*requests)
    assert together == [generate(request)[0] for request in requests]
    assert together[1] != generate(replace(requests[1], adapter=None))[0]


def test_bf16_is_exact() -> None:
    """Weights, keys and values are rounded, nothing else: for experts, adapters, shared prompts and new weights."""
    bf16, prompt = torch.bfloat16, list(range(150))
    adapted, adapter = build_adapter(1)
    rounded = {key: tensor.to(bf16) for key, tensor in adapter.items()}
    for key, tensor in adapter_tensors(adapted).items():
        tensor.copy_(tensor.to(bf16))
        assert torch.equal(tensor, rounded[f"base_model.model.{key}"].float())
    models = {version: build_model(version).to(bf16).float() for version in range(2)}
    engine = EmbeddedEngine(build_model(0).to(bf16), max_num_batched_tokens=64)
    assert (engine.dtype, engine.model.embedding().dtype) == (bf16, torch.float32)
    engine.load_adapter("a", rounded, AdapterSpec(4, 8.0, 5))
    adapted = adapted.to(bf16).float()
    requests = [
        GenerationRequest(prompt[: 150 - i // 3], SamplingParams(max_tokens=12, seed=i), adapter=(None, "a")[i % 2])
        for i in range(8)
    ]
    for output in run(engine, *requests):
        served = {5: adapted} if output.request.adapter else {0: models[0]}
        assert check_exact(output, served, kept=bf16) == 12
    published = {name: tensor.to(bf16) for name, tensor in tensor_names(models[1]).items()}
    assert engine.load_weights(published, 1)() == {name: digest_tensor(t) for name, t in published.items()}
    (output,) = run(engine, request(prompt, max_tokens=20))
    check_exact(output, {1: models[1]}, kept=bf16)
    engine.load_weights(tensor_names(build_model(1)), 2)
    (again,) = run(engine, request(prompt, max_tokens=20))
    assert (again.token_ids, again.logprobs) == (output.token_ids, output.logprobs), "rounded when they come in fp32"
    experts = EmbeddedEngine(build_experts(0).to(bf16))
    for output in run(experts, *(request(prompt[: 60 - i], max_tokens=8, seed=i) for i in range(5))):
        check_exact(output, {0: build_experts(0).to(bf16).float()}, kept=bf16)


def test_weights_that_do_not_fit_change_nothing() -> None:
    engine = EmbeddedEngine(build_model(0))
    before = {name: digest_tensor(tensor) for name, tensor in tensor_names(engine.model).items()}
    tensors = dict(tensor_names(build_model(1)))
    tensors.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        engine.load_weights(tensors, 1)
    assert engine.version == 0
    assert {name: digest_tensor(tensor) for name, tensor in tensor_names(engine.model).items()} == before


def test_digests_match_the_loaded_tensors() -> None:
    engine, new = EmbeddedEngine(build_model(0)), tensor_names(build_model(1))
    assert engine.load_weights(new, 7)() == {name: digest_tensor(tensor) for name, tensor in new.items()}
    assert engine.version == 7


def test_broken_weights_fail_requests_but_not_the_cache() -> None:
    models = {0: build_model(0)}
    engine = EmbeddedEngine(build_model(0))
    broken = {name: torch.full_like(tensor, math.nan) for name, tensor in tensor_names(models[0]).items()}
    engine.load_weights(broken, 1)
    (output,) = run(engine, request(list(range(30))))
    assert output.finish_reason == "error"
    engine.load_weights(tensor_names(models[0]), 0)
    (output,) = run(engine, request([1, 2, 3], max_tokens=40))
    assert check_exact(output, models) == 40


def test_broken_weights_that_score_leave_no_nan_in_the_cache() -> None:
    good = tensor_names(build_experts(0))
    engine = EmbeddedEngine(build_experts(0))  # not by the fused kernel, which reads no unused memory
    engine.load_weights({name: torch.full_like(tensor, math.nan) for name, tensor in good.items()}, 1)
    (output,) = run(engine, request(list(range(30)), max_tokens=0, prompt_logprobs=0))
    assert output.prompt_logprobs is not None and all(map(math.isnan, output.prompt_logprobs.logprobs))
    engine.load_weights(good, 0)
    (output,) = run(engine, request([1, 2, 3], max_tokens=8))
    assert output.finish_reason == "length"


@dataclass
class Row:
    """A sequence as the sampler sees it."""

    params: SamplingParams
    tokens: list[int]
    num_prompt: int = 1
    stop_ids: frozenset[int] = frozenset()
    grammar: None = None
    bias = cached_property(Sequence.bias.func)  # type: ignore[attr-defined]


def draw(logits: Tensor, params: SamplingParams, tokens: list[int] | None = None, **row: Any) -> tuple[int, float]:
    one = Row(params, tokens or [0], **row)
    positions = np.array([len(one.tokens)])
    sampled = sample(logits[None].clone(), build_sampling_batch([one], torch.device("cpu")), positions)
    return int(sampled.tokens[0]), float(sampled.logprobs[0])


def test_sampled_frequencies_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0])
    noise = uniform(np.arange(20000, dtype=np.uint64), np.full(20000, 11))
    tokens = sample_tokens(probs.log().expand(20000, -1), torch.from_numpy(noise))[0]
    counts = torch.bincount(tokens, minlength=5) / 20000
    assert torch.allclose(counts, probs, atol=0.015)
    assert counts[4] == 0
    along = uniform(np.full(20000, 5, dtype=np.uint64), np.arange(20000))
    assert abs(along.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 0.03


def test_the_last_possible_noise_draws_a_possible_token() -> None:
    logprobs = torch.tensor([[0.3, 0.7, 0.0, 0.0]]).log()
    assert sample_tokens(logprobs, torch.tensor([1 - 2**-53], dtype=torch.float64))[0].item() == 1
    assert sample_tokens(logprobs, torch.tensor([0.0], dtype=torch.float64))[0].item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_drawing_leaves_the_logprobs_as_they_are(dtype: torch.dtype) -> None:
    logprobs = torch.tensor([[0.25, 0.75]], dtype=dtype).log()
    before = logprobs.clone()
    sample_tokens(logprobs, torch.tensor([0.5], dtype=torch.float64))
    assert torch.equal(logprobs, before)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.5}, [0, 1]),  # 0.4 is not enough, 0.7 is
        ({"top_p": 0.4}, [0]),
        ({"top_p": 0.01}, [0]),
        ({"min_p": 0.4}, [0, 1, 2]),  # at least 0.16
        ({"top_k": 3, "top_p": 0.7}, [0, 1]),  # of 0.9: 0.44, 0.78
        ({"top_k": 99, "top_p": 1.0, "min_p": 0.0}, [0, 1, 2, 3]),
        ({"top_k": 2**64 - 1}, [0, 1, 2, 3]),
    ],
)
def test_filters_renormalize_over_the_kept_tokens(params: dict[str, Any], kept: list[int]) -> None:
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    order = torch.tensor([2, 0, 3, 1])  # not sorted, so that ranks must be carried back
    filtered = torch.softmax(filter_logprobs(probs[order].log()[None], [SamplingParams(max_tokens=1, **params)])[0], -1)
    expected = torch.zeros(4)
    expected[kept] = probs[kept] / probs[kept].sum()
    assert torch.allclose(filtered, expected[order], atol=1e-6)


@pytest.mark.parametrize("by_kernel", [True, False])
def test_top_p_of_one_keeps_every_token(by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also tokens before which the sum of probabilities rounds to 1."""
    if not by_kernel:
        monkeypatch.setattr("rollouts.kernels.cpu.runs_here", lambda *_: False)
    logprobs = torch.log_softmax(torch.tensor([[0.0, -50.0, -50.0]]), -1)
    assert torch.equal(filter_logprobs(logprobs, [SamplingParams(max_tokens=1, top_p=1.0)]), logprobs)


def test_a_filtered_row_does_not_touch_its_neighbours() -> None:
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    plain = Row(SamplingParams(max_tokens=1, seed=1), [0])
    rows = [plain, Row(replace(plain.params, top_p=0.3, logit_bias=((3, 5.0),)), [0]), plain]
    positions = np.array([1, 1, 1])
    mixed = sample(logits, build_sampling_batch(rows, torch.device("cpu")), positions)
    alone = sample(logits, build_sampling_batch([plain] * 3, torch.device("cpu")), positions)
    assert mixed.tokens[[0, 2]].tolist() == alone.tokens[[0, 2]].tolist()
    assert torch.equal(mixed.logprobs[[0, 2]], alone.logprobs[[0, 2]])


def test_adapters_are_listed_while_another_is_loaded() -> None:
    engine: Any = EmbeddedEngine(build_model(0))
    served = engine._adapters.served = {}

    class Loading:
        @property
        def spec(self) -> str:
            served["b"] = self
            return "loaded"

    served["a"] = Loading()
    assert engine.adapters() == {"a": "loaded"}


def test_biases_of_the_whole_vocabulary_are_added() -> None:
    """By one operation, with the bits of one addition for each."""
    biased = torch.randn(64, generator=torch.Generator().manual_seed(0))
    expected = biased.clone()
    pairs = (*((token, 0.1 * token - 3.3) for token in range(64)), (0, 0.7))
    adjust_logits(biased, Row(SamplingParams(max_tokens=1, logit_bias=pairs), [0]))  # type: ignore[arg-type]
    for token, value in pairs:
        expected[token] += value
    assert torch.equal(biased, expected)


def test_penalty_bias_and_minimum_length_change_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, -1.0, 0.0])
    greedy = SamplingParams(max_tokens=9, temperature=0.0)
    assert draw(logits, greedy)[0] == 0
    token, logprob = draw(logits, replace(greedy, repetition_penalty=4.0), [0, 2])
    assert token == 1
    assert logprob == pytest.approx(torch.log_softmax(torch.tensor([0.5, 1.0, -4.0, 0.0]), -1)[1].item())
    assert draw(logits, replace(greedy, logit_bias=((3, 9.0),)))[0] == 3
    short = replace(greedy, min_tokens=2)
    assert draw(logits, short, [5, 1], stop_ids=frozenset([0]))[0] == 1
    assert draw(logits, short, [5, 1, 1], stop_ids=frozenset([0]))[0] == 0


@given(st.lists(st.integers(0, 272), max_size=40))
@settings(max_examples=60, deadline=None)
def test_pieces_of_text_join_to_the_whole(ids: list[int]) -> None:
    detokenizer = Detokenizer(DECODE)
    text = "".join(detokenizer.add(token) for token in ids)
    whole = DECODE(ids, True)
    assert text in (whole, whole.rstrip("�"))
    watch = StopStringMatcher(Detokenizer(DECODE), ("never there",))
    assert not any(watch.add(token, True) for token in ids)
    assert watch.text == text


@pytest.mark.parametrize("ids", [[3, 4, 5, 6], [3, 2, 4, 5, 6], [1, 3, 2, 2, 1, 4], [3, *[2] * 100, 4]])
def test_words_stay_apart_around_special_tokens(ids: list[int]) -> None:
    """As decoders of Llama 2 join them: a text loses its first space."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁Hello": 3, "▁world": 4, "!": 5, "▁again": 6}
    tokenizer = Tokenizer(token_models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    detokenizer = Detokenizer(lambda tokens, skip: tokenizer.decode(tokens, skip_special_tokens=skip))
    assert "".join(map(detokenizer.add, ids)) == tokenizer.decode(ids)
    assert len(detokenizer._context) <= MAX_CONTEXT + 1


@pytest.mark.parametrize("text", ["€", "a€a😀a", "日本 é", "😀😀"])
def test_characters_of_byte_tokens_are_whole(text: str) -> None:
    """As Llama 2 and Gemma encode characters that are not in their vocabulary."""
    vocab = {"<unk>": 0, "▁": 1, "a": 2, **{f"<0x{i:02X}>": 3 + i for i in range(256)}}
    core = Tokenizer(token_models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)
    decode, ids, names = build_decode(tokenizer), tokenizer.encode(text), TokenNames(tokenizer)
    detokenizer, watch = Detokenizer(decode), StopStringMatcher(Detokenizer(decode), ("never there",))
    assert "".join(map(detokenizer.add, ids)) == text
    assert not any(watch.add(token, True) for token in ids) and watch.text == text
    assert bytes(byte for token in ids for byte in names[token][1]).decode() == text


@given(st.lists(st.sampled_from(TOKENIZER.encode("aé€😀", add_special_tokens=False)), min_size=40, max_size=120))
@settings(max_examples=30, deadline=None)
def test_runs_of_invalid_bytes_take_linear_time(ids: list[int]) -> None:
    """A policy that has collapsed may repeat a part of a character."""
    longest = 0

    def decode(tokens: list[int], skip: bool) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return DECODE(tokens, skip)

    repeated = ids[:1] * 200 + ids
    text = "".join(map(Detokenizer(decode).add, repeated))
    whole = DECODE(repeated, True)
    assert text.rstrip("�") == whole.rstrip("�") and whole.startswith(text)
    assert longest <= 2 * MAX_CONTEXT + 2


def test_a_stop_string_may_span_tokens_and_characters() -> None:
    ids = TOKENIZER.encode("aé\nUser: x", add_special_tokens=False)
    watch = StopStringMatcher(Detokenizer(DECODE), ("User:", "é\nUs"))
    hits = [watch.add(token, True) for token in ids]
    assert [hit for hit in hits if hit] == ["é\nUs"]
    assert hits.index("é\nUs") == 5
    names = TokenNames(TOKENIZER)
    assert bytes(byte for token in ids for byte in names[token][1]).decode() == "aé\nUser: x"


def test_steps_join_into_busy_intervals() -> None:
    rows: list[tuple[str, float, float, int]] = []

    class Log:
        def log_timeline(self, what: str, start: float, end: float, step: int) -> None:
            rows.append((what, start, end, step))

    clock = BusyIntervalLogger(Log())
    for start, end, version in [(1.0, 1.1, 0), (1.105, 1.2, 0), (1.3, 1.4, 0), (1.41, 1.5, 1), (1.5, 2.6, 1)]:
        clock.add(start, end, version)
    clock.add(2.61, 2.7, 1)
    clock.flush()
    clock.flush()
    assert [row[1:] for row in rows] == [(1.0, 1.2, 0), (1.3, 1.4, 0), (1.41, 1.5, 1), (1.5, 2.6, 1), (2.61, 2.7, 1)]


def test_engine_error_is_reported_once_and_ends_the_thread() -> None:
    engine = EmbeddedEngine(build_model(0))
    failures: list[BaseException] = []
    thread = EngineThread(engine, lambda events: None, failures.append)
    thread.start()
    assert thread.call(lambda e: e.max_model_len).result(timeout=20) == 2048
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda e: 1 // 0).result(timeout=20)
    thread.call(lambda e: setattr(e, "step", None)).result(timeout=20)
    thread.submit(request([1]))
    assert thread._thread is not None
    thread._thread.join(20)
    assert len(failures) == 1
    with pytest.raises(RuntimeError, match="stopped"):
        thread.submit(request([1]))


@pytest.mark.parametrize("closes", [False, True])
def test_calls_end_with_the_thread(closes: bool) -> None:
    """Those that are queued when a step fails, and cancelled ones."""
    engine, in_step, go_on = EmbeddedEngine(build_model(0)), threading.Event(), threading.Event()

    def step() -> list[Event]:
        in_step.set()
        assert go_on.wait(20)
        raise ZeroDivisionError("in a step")

    engine.step = step  # type: ignore[method-assign]
    thread = EngineThread(engine, lambda events: None, lambda error: None)
    thread.start()
    thread.submit(request([1]))
    assert in_step.wait(20)
    queued, cancelled = (thread.call(lambda e: e.version) for _ in range(2))
    assert cancelled.cancel()
    if closes:
        thread.close(timeout_s=0)
    go_on.set()
    with pytest.raises(EngineFailed, match="engine failed: in a step"):
        queued.result(timeout=20)
    assert thread._thread is not None
    thread._thread.join(20)
    assert not thread._thread.is_alive() and not thread._calls


def test_a_cancelled_call_is_not_run() -> None:
    thread = EngineThread(EmbeddedEngine(build_model(0)), lambda events: None, pytest.fail)
    held, ran = threading.Event(), list[int]()
    thread.start()
    first = thread.call(lambda e: held.wait(20))
    second = thread.call(lambda e: ran.append(1))
    assert second.cancel()
    held.set()
    assert first.result(timeout=20) and thread.call(lambda e: 3).result(timeout=20) == 3
    assert not ran
    thread.close()


def test_thread_rejects_pauses_aborts_and_continues() -> None:
    received: queue.Queue[Event] = queue.Queue()
    thread = EngineThread(EmbeddedEngine(build_model(0)), lambda events: [received.put(e) for e in events], pytest.fail)
    thread.start()
    thread.submit(request([1] * 5000))
    refused = received.get(timeout=20)
    assert isinstance(refused, Output)
    assert (refused.finish_reason, refused.token_ids) == ("error", [])
    thread.pause().result(timeout=20)
    waiting = request([1], max_tokens=3)
    thread.submit(waiting)
    assert thread.call(lambda e: e.stats().waiting).result(timeout=20) == 1
    thread.resume().result(timeout=20)
    answered = received.get(timeout=20)
    assert isinstance(answered, Output)
    assert (answered.request, len(answered.token_ids)) == (waiting, 3)
    thread.submit(request([1], max_tokens=2000, stream=True))
    assert isinstance(received.get(timeout=20), StreamUpdate)
    thread.pause(abort=True).result(timeout=20)
    assert thread.paused
    *pieces, last = list(received.queue)
    assert isinstance(last, Output)
    assert last.finish_reason == "abort"
    assert len(last.token_ids) == 1 + len(pieces)
    thread.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_column_is_zeros_from_a_line_of_the_cache_on(dtype: torch.dtype) -> None:
    for shape in ((2, 3, 5), (2, 0, 5), (4, 1024, 1024)):
        column = zeros(shape, dtype, torch.device("cpu"))
        assert column.shape == shape and column.dtype == dtype and not column.any()
        assert column.data_ptr() % 64 == 0 or not column.numel()
        column += 1
        assert (column == 1).all()
