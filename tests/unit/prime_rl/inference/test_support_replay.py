"""Truncated sampling from engine to trainer and teacher: all log-probs are those of the distribution sampled from."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.engine import GenerationRequest, Output, SamplingParams
from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.models.registry import load_decoder
from prime_rl.trainer.rl.data import check_batch
from prime_rl.trainer.rl.loss import build_loss
from prime_rl.transport.batches import decode_batch, encode_batch
from rollouts.agents import Turn
from rollouts.training.agent_integration import Rollout, rollout_to_samples
from rollouts.training.batching import pack_share
from rollouts.training.rl_losses import TokenStats
from rollouts.training.sampling_support import decode_supports
from rollouts.training.types import Sample

pytestmark = pytest.mark.usefixtures("one_thread")

FILTERS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.05},
    "all": {"top_p": 0.9, "top_k": 50, "min_p": 0.02},
}
SEQ_LEN = 96


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Backend:
    """A trainer whose distributions are far from uniform."""
    config = TrainConfig.model_validate(
        {
            "model": {"name": "tiny-qwen3", "seq_len": SEQ_LEN, "debug": {"random_init": True}},
            "output_dir": tmp_path_factory.mktemp("run"),
            "log": {"file": False},
        }
    )
    built = build_backend(config)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in built.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    return built


def generate(backend: Backend, requests: list[GenerationRequest]) -> list[Output]:
    served = load_decoder(backend.model_dir, random_init=True, seed=0)
    served.load_state_dict(backend.model.state_dict())
    engine = EmbeddedEngine(served, max_running=16, max_num_batched_tokens=100)
    for request in requests:
        engine.add(request)
    outputs: dict[GenerationRequest, Output] = {}
    while engine.has_work():
        outputs |= {event.request: event for event in engine.step() if isinstance(event, Output)}
    return [outputs[request] for request in requests]


def draw(num: int, filters: dict[str, Any], num_tokens: int = 24) -> list[GenerationRequest]:
    rng = random.Random(0)
    return [
        GenerationRequest(
            rng.choices(range(256), k=rng.randint(1, 40)),
            SamplingParams(
                max_tokens=num_tokens,
                temperature=rng.choice([0.7, 1.0, 1.3]),
                seed=seed,
                return_support=True,
                ignore_eos=True,
                **filters,
            ),
        )
        for seed in range(num)
    ]


def build_samples(outputs: list[Output]) -> list[Sample]:
    """As the trainer receives them."""
    samples = []
    for index, output in enumerate(outputs):
        request = output.request
        turn = Turn(
            request.prompt,
            output.token_ids,
            output.logprobs,
            output.versions,
            sampling_support=output.sampling_support,
        )
        rollout = Rollout(prompt="", turns=[turn], temperature=request.params.temperature)
        [sample] = rollout_to_samples(rollout, group_index=0, index=index)
        sample.advantages = [0.5 * mask for mask in sample.loss_mask]
        samples.append(sample)
    return decode_batch(encode_batch(1, samples))[1]


def measure(backend: Backend, samples: list[Sample]) -> TokenStats:
    config = TrainConfig.model_validate({"model": {"name": "tiny-qwen3"}, "loss": {"type": "ppo"}})
    check_batch(samples, config.loss, backend.model.config.vocab_size)
    return backend.evaluate(pack_share(samples, SEQ_LEN).micros, build_loss(config.loss, 32))


def find_largest(stats: TokenStats, name: str, target: float) -> tuple[int, float]:
    values = torch.cat(stats.values[name])
    return len(values), float((values - target).abs().max())


@pytest.mark.parametrize(
    ("name", "num"),
    [(name, 12) for name in FILTERS]
    + [pytest.param(name, 1050, marks=(pytest.mark.slow, pytest.mark.timeout(600))) for name in FILTERS],
)
def test_every_ratio_is_exactly_one(backend: Backend, name: str, num: int) -> None:
    """At learning rate 0; without replay the same samples show the bias. Slow: 100,800 tokens."""
    samples = build_samples(generate(backend, draw(num, FILTERS[name])))
    sizes = torch.cat([decode_supports(s.sampling_support, len(s.tokens)).sizes for s in samples])
    assert int(sizes.max()) > 1 and len({s.sampling_support for s in samples}) > 1
    replayed = measure(backend, samples)
    assert find_largest(replayed, "importance_ratio", 1.0) == (24 * num, 0.0)
    assert find_largest(replayed, "mismatch_kl", 0.0) == (24 * num, 0.0)
    assert find_largest(replayed, "entropy", 0.0)[1] < 6
    without = measure(backend, [msgspec.structs.replace(sample, sampling_support=b"") for sample in samples])
    ratios = torch.cat(without.values["importance_ratio"])
    assert bool((ratios <= 1).all()) and float(ratios.mean()) < 0.97, float(ratios.mean())


def test_a_teacher_scores_over_the_same_support(backend: Backend) -> None:
    """A teacher with the student's weights and prompt has the student's log-probs, so that their gap is exactly 0."""
    outputs = generate(backend, draw(12, FILTERS["all"]))
    scoring = [
        GenerationRequest(
            [*output.request.prompt, *output.token_ids],
            SamplingParams(
                max_tokens=0,
                prompt_logprobs=4,
                prompt_start=len(output.request.prompt),
                prompt_temperature=output.request.params.temperature,
                prompt_support=output.sampling_support,
            ),
        )
        for output in outputs
    ]
    whole = [GenerationRequest(r.prompt, replace(r.params, prompt_support=b"")) for r in scoring]
    for output, scored, plain in zip(outputs, generate(backend, scoring), generate(backend, whole), strict=True):
        assert scored.prompt_logprobs is not None and plain.prompt_logprobs is not None
        assert scored.prompt_logprobs.logprobs == output.logprobs
        assert plain.prompt_logprobs.logprobs != output.logprobs
        assert scored.prompt_logprobs.top_logprobs == plain.prompt_logprobs.top_logprobs, "tables are of all tokens"


def test_engines_return_supports_of_filtered_requests_only(backend: Backend) -> None:
    plain = SamplingParams(max_tokens=3, return_support=True)
    requests = [
        GenerationRequest([1], plain),
        GenerationRequest([1], replace(plain, top_k=2)),
        GenerationRequest([1], replace(plain, top_k=2, return_support=False)),
        GenerationRequest([1], replace(plain, top_k=2, temperature=0.0)),
    ]
    supports = [output.sampling_support for output in generate(backend, requests)]
    assert [bool(support) for support in supports] == [False, True, False, False]
    assert decode_supports(supports[1], 3).sizes.tolist() == [2, 2, 2]


def test_turns_are_joined_with_their_supports() -> None:
    def turn(prompt: list[int], completion: list[int], support: bytes) -> Turn:
        return Turn(prompt, completion, [-1.0] * len(completion), sampling_support=support)

    first, second = b"\x02\x03\x02\x04", b"\x02\x06"
    [sample] = rollout_to_samples(
        Rollout(prompt="", turns=[turn([1, 2], [3, 4], first), turn([1, 2, 3, 4, 5], [6], second)])
    )
    assert sample.tokens == [1, 2, 3, 4, 5, 6]
    assert sample.sampling_support == b"\x00\x00" + first + b"\x00" + second
    [mixed] = rollout_to_samples(Rollout(prompt="", turns=[turn([1], [3], b""), turn([1, 3, 4], [6], second)]))
    assert mixed.sampling_support == b"\x00\x00\x00" + second


def test_a_batch_with_a_wrong_support_is_rejected(backend: Backend) -> None:
    samples = build_samples(generate(backend, draw(1, FILTERS["top_k"], num_tokens=1)))
    samples[0].tokens[-1] = (samples[0].tokens[-1] + 1) % 256
    samples[0].sampling_support = samples[0].sampling_support[:-2]
    with pytest.raises(ValueError, match="sampling_support"):
        measure(backend, samples)
