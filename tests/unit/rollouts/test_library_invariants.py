"""What must hold for the library whatever the numbers: the properties that its other files do not state.

0-7, 11, 12, 14, 15  test_rollout_manager, test_rollout_invariants (and 13, 15 here)
8, 10                test_data_buffer
9, 13, 15, 16        here
17                   test_rollout_manager: a stream is never staler than its slots allow
18, 19               test_advantages
20                   test_objectives; of the documented losses on padded and packed batches here
21, 22               here, point by point in test_library_backends and test_weight_sync
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from fake_servers import FakeServer, FakeSGLang, FakeVLLM, serve_fakes
from hypothesis import given, settings
from hypothesis import strategies as st
from test_async_rollout_manager import PROMPTS, both_loops, conserved, make_generate
from test_library_backends import build_backend, latest_checkpoint, same, step, weights_of
from tiny_hf import build_batch
from virtual_time import run

from rollouts.training import steps
from rollouts.training.batching import pack_samples, pad_samples
from rollouts.training.datasets import DataBuffer
from rollouts.training.objectives import Objective
from rollouts.training.rl_losses import LossInputs, compute_label_logprobs, grpo_loss, policy_loss, ppo_loss
from rollouts.training.rollout_gen.async_rollout_manager import AsyncRolloutManager, NoTrainableGroupsError
from rollouts.training.types import RolloutConfig, Sample, Status
from rollouts.training.weight_sync import SGLangEngine, VLLMEngine, WeightSyncError, sync_weights_to_engines

few = settings(max_examples=20, deadline=None)


@given(
    prompts=st.lists(st.lists(st.integers(), max_size=3).map(lambda x: [{"role": "user", "n": x}]), min_size=1),
    takes=st.lists(st.integers(1, 9), max_size=6),
    seed=st.integers(0, 9),
)
def test_prompts_are_never_shared_with_the_caller(prompts: list[Any], takes: list[int], seed: int) -> None:
    """Invariant 9: the list that was given stays as it is, and changing a prompt changes nobody else's."""
    before = json.dumps(prompts)
    buffer, again = DataBuffer(prompts, seed=seed), DataBuffer(prompts, seed=seed)
    for n in takes:
        taken, expected = buffer.get_prompts(n), again.get_prompts(n)
        assert taken == expected
        for prompt in taken:
            prompt[0]["n"] = "spoiled"
            prompt.append("more")
    assert json.dumps(prompts) == before


def keep_nothing(group: list[Sample]) -> bool:
    return False


@both_loops
@few
@given(seed=st.integers(0, 10**6), size=st.integers(1, 4), factor=st.sampled_from([1.0, 1.5, 3.0]))
def test_filter_rejecting_all_groups_raises_with_reason(backend: str, seed: int, size: int, factor: float) -> None:
    """Invariant 13: a bounded search, an error that names why, and every group accounted for."""

    async def main() -> None:
        config = RolloutConfig(size, 1, factor, filter_fn=keep_nothing)
        manager = AsyncRolloutManager(DataBuffer(PROMPTS), config, generate_group=make_generate(seed, 1))
        with pytest.raises(NoTrainableGroupsError, match="keep_nothing"):
            await manager.generate_batch()
        conserved(manager.groups)
        assert not manager.groups.in_flight and manager.groups.num_emitted == 0
        assert 10 * size <= manager.groups.drops.total() <= 10 * size + 2 * max(1, round(size * factor))

    run(main, backend)


@both_loops
@few
@given(seed=st.integers(0, 10**6), size=st.integers(1, 3), moments=st.lists(st.floats(0, 25), max_size=3))
def test_aborts_lose_no_groups(backend: str, seed: int, size: int, moments: list[float]) -> None:
    """Invariant 15: before, during and twice at once; the next call goes on where the last one was."""

    async def main() -> list[int]:
        manager = AsyncRolloutManager(DataBuffer(PROMPTS), RolloutConfig(size), generate_group=make_generate(seed, 1))
        manager.request_abort()  # nothing is under way: nothing happens
        emitted: list[int] = []

        async def abort(moment: float) -> None:
            await anyio.sleep(moment)
            manager.request_abort()
            manager.request_abort()

        async with anyio.create_task_group() as tasks:
            for moment in moments:
                tasks.start_soon(abort, moment)
            while len(emitted) < 3 * size:
                try:
                    emitted += (await manager.generate_batch()).group_indices
                except RuntimeError as error:
                    assert "Abort requested" in str(error)
                    conserved(manager.groups)
            tasks.cancel_scope.cancel()
        return emitted

    assert run(main, backend) == list(range(3 * size))


LOGPROBS = st.floats(-9, 0)
texts = st.text(max_size=5)
messages = st.lists(st.fixed_dictionaries({"role": texts, "content": texts}), max_size=2)


@st.composite
def whole_samples(draw: st.DrawFn) -> Sample:
    """Samples whose streams all cover the tokens."""
    n = draw(st.integers(1, 6))

    def stream(values: Any = LOGPROBS) -> Any:
        return draw(st.lists(values, min_size=n, max_size=n))

    return Sample(
        prompt=draw(st.one_of(texts, messages)),
        response=draw(texts),
        tokens=stream(st.integers(0, 99)),
        loss_mask=stream(st.sampled_from([0.0, 0.5, 1.0])),
        reward=draw(st.floats(-9, 9)),
        group_index=draw(st.none() | st.integers(0, 9)),
        metadata=draw(st.dictionaries(texts, st.one_of(texts, st.integers(-9, 9), st.booleans()), max_size=2)),
        inference_logprobs=draw(st.none() | st.just(stream())),
        status=draw(st.sampled_from(Status)),
        error=draw(st.none() | texts),
        advantages=draw(st.none() | st.just(stream())),
        teacher_logprobs=draw(st.none() | st.just(stream())),
        versions=draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=2)),
    )


@given(sample=whole_samples(), extra=st.integers(1, 3))
def test_samples_survive_the_round_trip_and_refuse_uneven_streams(sample: Sample, extra: int) -> None:
    """Invariant 16."""
    sample.validate()
    data = json.loads(json.dumps(sample.to_dict()))
    before = json.dumps(data)
    assert Sample.from_dict(data) == sample and json.dumps(data) == before
    with pytest.raises(ValueError, match="unknown field"):
        Sample.from_dict(data | {"reweard": 1})
    for name in ("loss_mask", "inference_logprobs", "advantages", "teacher_logprobs"):
        stream = getattr(sample, name)
        if stream is not None:
            bad = Sample.from_dict(data)
            setattr(bad, name, [*stream, *[0.0] * extra])
            with pytest.raises(ValueError, match=f"{len(stream)} tokens but {len(stream) + extra} entries in `{name}`"):
                bad.validate()


VOCAB = 11


def random_samples(seed: int, num: int) -> list[Sample]:
    rng = random.Random(seed)
    out = []
    for _ in range(num):
        n = rng.randint(2, 9)
        mask = [0.0] + [float(rng.random() < 0.7) for _ in range(n - 1)]
        mask[-1] = 1.0
        out.append(
            Sample(
                prompt="",
                tokens=[rng.randrange(VOCAB) for _ in range(n)],
                loss_mask=mask,
                inference_logprobs=[-rng.random() * 3 for _ in range(n)],
                advantages=[rng.gauss(0, 1)] * n,
            )
        )
    return out


@few
@given(seed=st.integers(0, 10**6), num=st.integers(1, 6), width=st.sampled_from([9, 16, 40]), extra=st.integers(1, 8))
def test_losses_are_independent_of_padding_and_packing(seed: int, num: int, width: int, extra: int) -> None:
    """Invariant 20, on a model of one table: grpo_loss and ppo_loss padded, wider, and packed by `pack_samples`."""
    samples = random_samples(seed, num)
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def gradient(loss_of: Any) -> tuple[float, torch.Tensor]:
        free = table.clone().requires_grad_()
        loss = loss_of(free)
        return loss.item(), torch.autograd.grad(loss, free)[0]

    def padded(name: str, multiple: int) -> Any:
        batch = {
            key: x.double() if x.is_floating_point() else x
            for key, x in pad_samples(samples, multiple=multiple).items()
        }
        streams = [batch["labels"], batch["loss_mask"], batch["advantages"]]
        if name == "ppo":
            return lambda free: ppo_loss(free[batch["input_ids"]], *streams, batch["old_log_probs"], 0.2)
        return lambda free: grpo_loss(free[batch["input_ids"]], *streams)

    def packed(objective: Objective) -> Any:
        micros = [micro.to_tensors() for rank in pack_samples(samples, width, 2) for micro in rank if micro.loss_count]

        def loss(free: torch.Tensor) -> torch.Tensor:
            outputs = []
            for micro in micros:
                logprobs = compute_label_logprobs(free[micro.input_ids][None], micro.labels[None])[0]
                streams = (micro.inference_logprobs, micro.advantages, micro.loss_mask)
                outputs.append(policy_loss(LossInputs(logprobs, *streams, micro.sequence), objective))
            return torch.stack([o.loss_sum for o in outputs]).sum() / torch.stack([o.count for o in outputs]).sum()

        return loss

    rows = {
        "ppo": Objective("ppo", detached=False, clip_low=0.2, clip_high=0.2),
        "grpo": Objective("grpo", ratio="none", loss_aggregation="seq-mean-token-mean"),
    }
    for name, objective in rows.items():
        value, expected = gradient(padded(name, 1))
        for way in (padded(name, extra), packed(objective)):
            found, grad = gradient(way)
            assert found == pytest.approx(value, abs=1e-6) and torch.allclose(grad, expected, atol=1e-6), name


@settings(max_examples=4, deadline=None)
@given(cut=st.integers(1, 4), seeds=st.lists(st.integers(0, 99), min_size=5, max_size=5), crash=st.integers(0, 7))
def test_interrupted_run_resumes_bit_identically(cut: int, seeds: list[int], crash: int) -> None:
    """Invariant 21: save, die while saving again, load the latest, go on."""
    batches = [build_batch(seed=seed) for seed in seeds]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        straight, first = build_backend(path / "a"), build_backend(path / "b")
        for batch in batches:
            step(straight, batch)
        for batch in batches[:cut]:
            step(first, batch)
        saved = anyio.run(first.save_checkpoint, cut, {})
        step(first, batches[0])  # what the crash takes away
        with pytest.MonkeyPatch.context() as patch:
            die_at(patch, crash)
            with pytest.raises(KeyboardInterrupt):
                anyio.run(first.save_checkpoint, cut + 1, {})
        assert latest_checkpoint(path / "b") == saved
        resumed = build_backend(path / "b", seed=1)
        anyio.run(resumed.load_checkpoint, saved)
        for batch in batches[cut:]:
            step(resumed, batch)
        assert same(weights_of(straight), weights_of(resumed))


def die_at(patch: pytest.MonkeyPatch, nth: int) -> None:
    """Let the nth write to disk be the last thing that happens; nobody tidies up."""
    count = iter(range(1000))

    def dying(real: Any) -> Any:
        def write(*args: Any, **options: Any) -> Any:
            if next(count) >= nth:
                raise KeyboardInterrupt
            return real(*args, **options)

        return write

    writes = [(torch, "save"), (Path, "write_text"), (Path, "touch"), (steps, "_fsync"), (steps.os, "rename")]
    for owner, name in writes:
        patch.setattr(owner, name, dying(getattr(owner, name)))
    patch.setattr(steps.shutil, "rmtree", lambda *_, **__: None)


EXPECTED = {"fine": "ok", "refuses": "refused", "wrong version": "mismatch"}


def test_sync_keeps_order_and_names_failed_engines(tmp_path: Path) -> None:
    """Invariant 22: answers in engine order, one error that names each failure, pause <= update <= continue."""
    fakes: list[FakeServer] = [FakeSGLang(), FakeVLLM(), FakeSGLang(), FakeVLLM()]

    @settings(max_examples=10, deadline=None)
    @given(
        loop=st.sampled_from(["asyncio", "trio"]),
        kinds=st.lists(st.sampled_from(list(EXPECTED)), min_size=4, max_size=4),
        order=st.permutations(range(4)),
        num=st.integers(1, 4),
        step=st.integers(1, 10**4),
    )
    def check(loop: str, kinds: list[str], order: list[int], num: int, step: int) -> None:
        chosen = [(fakes[i], kinds[i]) for i in order[:num]]
        for fake, kind in chosen:
            fake.calls.clear()
            fake.version, fake.refuse, fake.wrong_version = "default", kind == "refuses", kind == "wrong version"
        path = tmp_path / f"step_{step}"
        path.mkdir(exist_ok=True)
        engines = [
            (SGLangEngine if isinstance(fake, FakeSGLang) else VLLMEngine)(fake.url, timeout=20.0) for fake, _ in chosen
        ]

        async def sync() -> list[dict[str, Any]]:
            return await sync_weights_to_engines(engines, str(path))

        if all(kind == "fine" for _, kind in chosen):
            answers = anyio.run(sync, backend=loop)
            assert ["results" in answer for answer in answers] == [isinstance(fake, FakeVLLM) for fake, _ in chosen]
            assert all(answer["version"] == str(step) for answer in answers)
        else:
            with pytest.raises(WeightSyncError) as error:
                anyio.run(sync, backend=loop)
            assert [name for name, _ in error.value.states] == [str(engine) for engine in engines]
            for (_, state), (_, kind) in zip(error.value.states, chosen, strict=True):
                assert state.startswith(EXPECTED[kind])
        for fake, kind in chosen:
            pause, update, resume = (
                ("/pause_generation", "/update_weights_from_disk", "/continue_generation")
                if isinstance(fake, FakeSGLang)
                else ("/pause", "/collective_rpc", "/resume")
            )
            calls = [call for call in fake.calls if call in (pause, update, resume)]
            assert calls == ([pause, update, resume] if kind == "fine" else [pause, update]), kind

    with serve_fakes(*fakes):
        check()
