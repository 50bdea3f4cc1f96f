"""Training loops: logs, checkpoints, weight sync, and resuming."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from tiny_hf import VOCAB, build_samples, build_tiny_hf

from rollouts.training.backends import latest_checkpoint
from rollouts.training.backends.pytorch import PyTorchTrainingBackend
from rollouts.training.backends.pytorch_factory import create_adamw_optimizer, create_cross_entropy_loss
from rollouts.training.datasets.data_buffer import DataBuffer
from rollouts.training.filters import check_quality_and_diversity, check_reward_nonzero_std
from rollouts.training.loops.rl_loop import (
    compute_advantages,
    compute_reward,
    next_batch,
    prepare_grpo_batch,
    run_rl_training,
)
from rollouts.training.loops.sft_loop import prepare_sft_batch, run_sft_training
from rollouts.training.loops.stepping import merge_rows, run_step
from rollouts.training.metrics import JSONLLogger
from rollouts.training.rl_losses import grpo_loss, ppo_loss
from rollouts.training.rollout_gen.async_rollout_manager import AsyncRolloutManager, NoTrainableGroupsError
from rollouts.training.steps import complete_steps
from rollouts.training.types import (
    ImmediateTrainFuture,
    RLTrainingConfig,
    RolloutBatch,
    RolloutConfig,
    Sample,
    SFTTrainingConfig,
    TrainFuture,
)

LOOPS = ("asyncio", "trio")


def build_backend(path: Path, loss_fn: Any = None, seed: int = 0, lr: float = 1e-2) -> PyTorchTrainingBackend:
    model = build_tiny_hf(seed)
    return PyTorchTrainingBackend(
        model, create_adamw_optimizer(model, lr), loss_fn or create_cross_entropy_loss(), path
    )


def run(function: Any, *args: Any, loop: str = "asyncio") -> Any:
    return anyio.run(function, *args, backend=loop)


def weights_equal(a: PyTorchTrainingBackend, b: PyTorchTrainingBackend) -> bool:
    ours, theirs = a.get_weights().wait(), b.get_weights().wait()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("loop", LOOPS)
def test_sft_learns_logs_and_saves(tmp_path: Path, loop: str) -> None:
    pytest.importorskip(loop)
    backend = build_backend(tmp_path / "ckpt")
    config = SFTTrainingConfig(num_steps=10, batch_size=4, log_every=4, checkpoint_every=4)
    rows = run(run_sft_training, backend, build_samples(6), config, JSONLLogger(tmp_path), loop=loop)
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert {"loss", "grad_norm", "lr", "step"} <= rows[0].keys() and rows[-1]["loss"] < rows[0]["loss"] - 1
    logged = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert logged == [4, 8, 10] and complete_steps(tmp_path / "ckpt") == [4, 8, 10]


def test_sft_resumed_is_sft_uninterrupted(tmp_path: Path) -> None:
    samples = build_samples(5)
    straight = build_backend(tmp_path / "a")
    rows = run(run_sft_training, straight, samples, SFTTrainingConfig(9, 3, checkpoint_every=4))
    resumed = build_backend(tmp_path / "b", seed=1)
    run(resumed.load_checkpoint, tmp_path / "a" / "step_4")
    again = run(run_sft_training, resumed, samples, SFTTrainingConfig(5, 3))
    assert again == rows[4:] and weights_equal(straight, resumed)
    run(resumed.load_checkpoint, tmp_path / "a" / "step_4")
    for _ in range(2):  # again, as in a notebook
        with pytest.raises(ValueError, match="other prompts"):
            run(run_sft_training, resumed, build_samples(5, seed=9), SFTTrainingConfig(1, 3))


def test_a_second_sft_run_continues_or_is_a_new_stage(tmp_path: Path) -> None:
    backend, straight = build_backend(tmp_path / "a"), build_backend(tmp_path / "b")
    parts = [run(run_sft_training, backend, build_samples(5), SFTTrainingConfig(2, 2))[-1] for _ in range(2)]
    whole = run(run_sft_training, straight, build_samples(5), SFTTrainingConfig(4, 2))
    assert parts == [whole[1], whole[3]], "on the same samples it goes on where the first run ended"
    rows = run(run_sft_training, backend, build_samples(7, seed=9), SFTTrainingConfig(1, 2))
    assert rows[0]["step"] == 5 and backend.data_state["sft"]["sample_offset"] == 2


def test_a_second_rl_run_generates_groups_of_its_own(tmp_path: Path) -> None:
    async def generate(prompts: list[Any]) -> list[Sample]:
        return [Sample(prompt, "x", [2, 3, 4], [0.0, 0.0, 1.0]) for prompt in prompts]

    backend, rewards = build_backend(tmp_path, grpo_loss), []
    for reward in (1.0, -7.0):
        buffer = DataBuffer(list("abcdef"))
        rollouts = RolloutConfig(1, over_sampling_factor=3, generate_fn=generate, reward_fn=lambda _, r=reward: r)
        rows = run(run_rl_training, backend, buffer, AsyncRolloutManager(buffer, rollouts), [], RLTrainingConfig(2))
        rewards += [row["mean_reward"] for row in rows]
    assert rewards == [1.0, 1.0, -7.0, -7.0]


def test_a_sample_that_is_refused_is_named(tmp_path: Path) -> None:
    samples = build_samples(4)
    samples[2].loss_mask = [1.0]
    with pytest.raises(ValueError, match=r"samples\[2\]: sample has \d+ tokens but 1 entries in `loss_mask`"):
        run(run_sft_training, build_backend(tmp_path), samples, SFTTrainingConfig(1, 2))


def test_sft_learns_tokens_however_they_were_sampled(tmp_path: Path) -> None:
    plain, sampled = build_samples(4), build_samples(4)
    for sample, temperature in zip(sampled, (0.0, 0.5, 1.0, 2.0), strict=True):
        sample.temperature, sample.sampling_support = temperature, b"\0" * len(sample.tokens)
    config = SFTTrainingConfig(2, 4)
    rows = [run(run_sft_training, build_backend(tmp_path), samples, config) for samples in (plain, sampled)]
    assert rows[0] == rows[1]


def test_micro_batches_change_nothing(tmp_path: Path) -> None:
    samples = build_samples(7)
    whole = run(run_sft_training, build_backend(tmp_path / "a"), samples, SFTTrainingConfig(3, 6))
    parts = run(run_sft_training, build_backend(tmp_path / "b"), samples, SFTTrainingConfig(3, 6, micro_batch_size=4))
    for mine, theirs in zip(whole, parts, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


def test_a_refused_micro_batch_leaves_no_gradient(tmp_path: Path) -> None:
    backend, samples = build_backend(tmp_path), build_samples(2)

    def collate(part: Sequence[Sample]) -> dict[str, torch.Tensor]:
        if part[0] is samples[1]:
            raise ValueError("refused")
        return prepare_sft_batch(part)

    with pytest.raises(ValueError, match="refused"):
        run(run_step, backend, samples, collate, 1)
    samples[0].loss_mask = [0.0] * len(samples[0].tokens)
    [row] = run(run_sft_training, backend, samples[:1], SFTTrainingConfig(1, 1))
    assert row["skipped"] == 1 and row["grad_norm"] == 0


def test_metrics_are_those_of_all_micro_batches() -> None:
    rows = [{"loss": 1.0, "grad_norm": 3.0, "r/max": 2.0, "r/min": 0.5}, {"loss": 4.0, "r/max": 1.0, "r/min": 0.1}]
    rows[1] |= {"grad_norm": 2.0, "ref_kl": 0.5}
    others: list[Any] = [{"note": "a", "best": None}, {"note": "b", "best": None}]
    assert merge_rows(others, [2, 1]) == {"note": "b", "best": None}
    assert merge_rows(rows, [2, 1]) == {"loss": 2.0, "grad_norm": 2.0, "r/max": 2.0, "r/min": 0.1, "ref_kl": 0.5}


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_a_step_reports_metrics_of_its_loss(tmp_path: Path, micro_batch_size: int | None) -> None:
    def loss(logits: torch.Tensor, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, float]]:
        return logits.sum() * 0.0, {"first": float(batch["input_ids"][:, 0].double().mean())}

    samples, config = build_samples(6), SFTTrainingConfig(1, 6, micro_batch_size=micro_batch_size)
    row = run(run_sft_training, build_backend(tmp_path, loss), samples, config)[0]
    assert row["first"] == pytest.approx(sum(sample.tokens[0] for sample in samples) / 6)


class Policy:
    """A real engine in miniature: its own copy of the model, sampled token by token, loaded from directories."""

    def __init__(self) -> None:
        self.model = build_tiny_hf(3).eval()
        self.loaded: list[str] = []

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(checkpoint_path).eval()
        self.loaded.append(Path(checkpoint_path).name)
        return {"success": True}

    @torch.no_grad()
    def sample(self, prompt: list[int], seed: int, num_tokens: int = 4) -> tuple[list[int], list[float]]:
        draw, tokens, logprobs = random.Random(seed), list(prompt), [0.0] * len(prompt)
        for _ in range(num_tokens):
            logp = torch.log_softmax(self.model(torch.tensor([tokens])).logits[0, -1], -1)
            token = min(int((logp.exp().cumsum(0) < draw.random()).sum()), VOCAB - 1)
            tokens.append(token)
            logprobs.append(float(logp[token]))
        return tokens, logprobs

    async def generate(self, prompts: list[list[int]], seed: int) -> list[Sample]:
        samples = []
        for prompt in prompts:
            tokens, logprobs = self.sample(prompt, seed)
            mask = [0.0] * len(prompt) + [1.0] * (len(tokens) - len(prompt))
            words = tokens[len(prompt) :]
            share = sum(t < VOCAB // 4 for t in words) / len(words)
            samples.append(Sample(str(prompt), str(words), tokens, mask, reward=share, inference_logprobs=logprobs))
        return samples


def build_rl(
    path: Path, loss_fn: Any = grpo_loss, **options: Any
) -> tuple[Any, DataBuffer, AsyncRolloutManager, Policy]:
    policy = Policy()
    buffer = DataBuffer([[2, i] for i in range(3, 9)])
    config = RolloutConfig(batch_size=2, n_samples_per_prompt=4, generate_fn=policy.generate)
    return build_backend(path, loss_fn, seed=3), buffer, AsyncRolloutManager(buffer, config, **options), policy


@pytest.mark.parametrize("loop", ["asyncio", pytest.param("trio", marks=pytest.mark.slow)])
def test_rl_raises_the_reward_and_keeps_the_engine_up_to_date(tmp_path: Path, loop: str) -> None:
    pytest.importorskip(loop)
    policy, buffer = Policy(), DataBuffer([[2, i] for i in range(3, 9)])
    rollouts = RolloutConfig(batch_size=2, n_samples_per_prompt=8, generate_fn=policy.generate)
    manager, backend = AsyncRolloutManager(buffer, rollouts), build_backend(tmp_path / "ckpt", ppo_loss, 3, lr=2e-2)
    config = RLTrainingConfig(14, sync_every=2, log_every=5, checkpoint_every=5, estimator="mean", advantage_std=True)
    rows = run(run_rl_training, backend, buffer, manager, [policy], config, JSONLLogger(tmp_path), loop=loop)
    assert policy.loaded == [f"step_{n}" for n in range(0, 15, 2)]
    assert complete_steps(tmp_path / "ckpt") == [5, 10, 14]
    assert {"loss", "grad_norm", "lr", "step", "mean_reward", "max_reward", "min_reward"} <= rows[0].keys()
    first, last = (sum(row["mean_reward"] for row in part) / 3 for part in (rows[:3], rows[-3:]))
    assert last > first + 0.25, (first, last)
    held = policy.model.state_dict()
    assert all(torch.equal(value, held[name]) for name, value in backend.get_weights().wait().items())


def test_rl_begins_with_its_own_weights_in_the_engine(tmp_path: Path) -> None:
    backend, buffer, manager, policy = build_rl(tmp_path)
    policy.model = build_tiny_hf(5).eval()  # as a server that an earlier run has trained
    rows = run(run_rl_training, backend, buffer, manager, [policy], RLTrainingConfig(num_steps=2, sync_every=2))
    backend, buffer, manager, policy = build_rl(tmp_path)
    assert rows == run(run_rl_training, backend, buffer, manager, [policy], RLTrainingConfig(2, sync_every=2))
    assert policy.loaded == ["step_0", "step_2"]


def test_rl_resumed_is_rl_uninterrupted(tmp_path: Path) -> None:
    config = RLTrainingConfig(num_steps=4, sync_every=1, checkpoint_every=2, estimator="leave_one_out")
    backend, buffer, manager, policy = build_rl(tmp_path / "a")
    rows = run(run_rl_training, backend, buffer, manager, [policy], config)
    resumed, buffer, manager, policy = build_rl(tmp_path / "b")
    run(resumed.load_checkpoint, tmp_path / "a" / "step_2")
    config = RLTrainingConfig(num_steps=2, sync_every=1, estimator="leave_one_out")
    again = run(run_rl_training, resumed, buffer, manager, [policy], config)
    assert policy.loaded == ["step_2", "step_3", "step_4"]  # what it goes on from reaches the engine first
    assert again == rows[2:] and weights_equal(backend, resumed)


def test_rl_goes_back_to_a_checkpoint_in_the_same_process(tmp_path: Path) -> None:
    backend, buffer, manager, policy = build_rl(tmp_path)
    rows = run(run_rl_training, backend, buffer, manager, [policy], RLTrainingConfig(4, 1, checkpoint_every=2))
    run(backend.load_checkpoint, tmp_path / "step_2")
    again = run(run_rl_training, backend, buffer, manager, [policy], RLTrainingConfig(2, 1))
    assert again == rows[2:] and buffer.position == 8


def test_rl_with_a_stream_of_groups(tmp_path: Path) -> None:
    backend, buffer, manager, policy = build_rl(tmp_path, slots=4)
    config = RLTrainingConfig(num_steps=4, sync_every=2)
    rows = run(run_rl_training, backend, buffer, manager, [policy], config)
    assert len(rows) == 4 and policy.loaded == ["step_0", "step_2", "step_4"]
    with pytest.raises(ValueError, match=r"slots 4 are used up .* at least 6"):
        run(run_rl_training, backend, buffer, manager, [policy], RLTrainingConfig(num_steps=4, sync_every=3))


def test_a_run_after_an_interrupted_one_has_all_slots(tmp_path: Path) -> None:
    backend, buffer, manager, policy = build_rl(tmp_path, slots=2)

    async def run_twice() -> None:
        policy.update_weights_from_checkpoint = load_first  # type: ignore
        with pytest.raises(RuntimeError, match="no memory"):
            await run_rl_training(backend, buffer, manager, [policy], RLTrainingConfig(2, sync_every=1))
        policy.update_weights_from_checkpoint = load  # type: ignore
        with anyio.fail_after(30):
            rows = await run_rl_training(backend, buffer, manager, [policy], RLTrainingConfig(2, sync_every=1))
        assert [row["step"] for row in rows] == [2, 3]
        assert policy.loaded == ["step_0", "step_1", "step_2", "step_3"]

    async def load_first(checkpoint_path: str) -> dict[str, Any]:
        if policy.loaded:
            raise RuntimeError("no memory")
        return await load(checkpoint_path)

    load = policy.update_weights_from_checkpoint
    run(run_twice)


@pytest.mark.parametrize("slots", [None, 4])
def test_filters_judge_the_rewards_of_the_loop(tmp_path: Path, slots: int | None) -> None:
    backend, buffer, _, policy = build_rl(tmp_path)
    numbers = count()

    async def generate(prompts: list[list[int]], seed: int) -> list[Sample]:
        samples = await policy.generate(prompts, seed)
        for sample in samples:
            sample.reward, sample.metadata = 0.0, {"correct": next(numbers) % 2 == 0}
        return samples

    rollouts = RolloutConfig(2, n_samples_per_prompt=2, generate_fn=generate, filter_fn=check_reward_nonzero_std)
    manager = AsyncRolloutManager(buffer, rollouts, slots=slots)
    rows = run(run_rl_training, backend, buffer, manager, [], RLTrainingConfig(num_steps=2))
    assert [row["mean_reward"] for row in rows] == [0.5, 0.5]


@pytest.mark.parametrize("slots", [None, 4])
def test_rl_without_trainable_groups_says_so(tmp_path: Path, slots: int | None) -> None:
    backend, buffer, _, policy = build_rl(tmp_path)
    rollouts = RolloutConfig(2, generate_fn=policy.generate, filter_fn=lambda group: False)
    manager = AsyncRolloutManager(buffer, rollouts, slots=slots)
    with pytest.raises(NoTrainableGroupsError, match="groups in a row were dropped"):
        run(run_rl_training, backend, buffer, manager, [], RLTrainingConfig(num_steps=2))


def test_the_documented_example_ends(tmp_path: Path) -> None:
    async def generate_fn(prompts: list[str]) -> list[Sample]:
        return [
            Sample(prompt=p, response="a", tokens=[2, 3, 4], loss_mask=[0, 0, 1], metadata={"correct": p == "x"})
            for p in prompts
        ]

    buffer = DataBuffer(prompts=["x", "y"])
    rollouts = RolloutConfig(batch_size=2, generate_fn=generate_fn, filter_fn=check_quality_and_diversity)
    manager = AsyncRolloutManager(buffer, rollouts)
    backend = build_backend(tmp_path, grpo_loss)
    rows = run(run_rl_training, backend, buffer, manager, [], RLTrainingConfig(num_steps=2, baseline=0.5))
    assert [row["mean_reward"] for row in rows] == [0.5, 0.5]


def test_rl_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    backend, _, manager, policy = build_rl(tmp_path)
    with pytest.raises(ValueError, match="another DataBuffer"):
        run(run_rl_training, backend, DataBuffer(["x"]), manager, [policy], RLTrainingConfig(num_steps=1))
    buffer = DataBuffer(["x"])
    alone = AsyncRolloutManager(buffer, RolloutConfig(1, generate_fn=policy.generate))
    with pytest.raises(ValueError, match="'mean' compares the samples of a prompt, so with n_samples_per_prompt = 1"):
        run(run_rl_training, backend, buffer, alone, [policy], RLTrainingConfig(num_steps=1, estimator="mean"))


async def generate_bools(prompts: list[Any]) -> list[Sample]:
    return [Sample(prompt, "x", [2, 3, 4], [False, False, True], reward=True) for prompt in prompts]


def test_rows_and_bools_survive_a_resume(tmp_path: Path) -> None:
    def build(path: Path) -> tuple[Any, DataBuffer, AsyncRolloutManager]:
        buffer = DataBuffer([{"question": str(i)} for i in range(4)])
        rollouts = RolloutConfig(1, over_sampling_factor=2.0, generate_fn=generate_bools)
        return build_backend(path, grpo_loss), buffer, AsyncRolloutManager(buffer, rollouts)

    run(run_rl_training, *build(tmp_path / "a"), [], RLTrainingConfig(1))
    backend, buffer, manager = build(tmp_path / "b")
    backend.start_from(tmp_path / "a" / "step_1")
    assert run(run_rl_training, backend, buffer, manager, [], RLTrainingConfig(1))[0]["mean_reward"] == 1
    assert buffer.position == 2, "the second group was generated before the checkpoint"


def test_ranks_share_samples_with_bools() -> None:
    class Ranks:
        rank, world_size = 0, 2

        async def broadcast(self, payload: bytes) -> bytes:
            return payload

    manager = AsyncRolloutManager(DataBuffer([{"question": "1"}]), RolloutConfig(1, generate_fn=generate_bools))
    batch = run(next_batch, Ranks(), manager)
    assert batch.loss_masks == [[0.0, 0.0, 1.0]] == [sample.loss_mask for sample in batch.samples]
    assert batch.rewards == [1.0] and batch.samples[0].prompt == {"question": "1"}


def test_a_batch_that_ranks_cannot_share_is_refused_first(tmp_path: Path) -> None:
    backend: Any = SeedBackend(tmp_path)
    backend.rank, backend.world_size = 0, 2
    with pytest.raises(ValueError, match="3 samples does not divide over 2 ranks: change batch_size"):
        run(run_sft_training, backend, build_samples(3), SFTTrainingConfig(1, 3))
    _, buffer, manager, _ = build_rl(tmp_path)
    backend.world_size = 3
    with pytest.raises(ValueError, match="8 samples does not divide over 3 ranks"):
        run(run_rl_training, backend, buffer, manager, [], RLTrainingConfig(1))
    assert not backend.batches and buffer.position == 0


class SeedBackend:
    """A backend written from the documented protocol alone: coroutines that return futures with only `result()`."""

    class Future:
        def __init__(self, value: Any) -> None:
            self.value = value

        async def result(self) -> Any:
            return self.value

    def __init__(self, root: Path) -> None:
        self.root, self.batches, self.saved = root, [], []

    async def forward_backward(self, batch: dict[str, Any]) -> Future:
        self.batches.append(batch)
        return self.Future({"loss": 2.0, "grad_norm": 1.0})

    def optim_step(self) -> TrainFuture[dict[str, float]]:
        return ImmediateTrainFuture({"lr": 0.1, "step": len(self.batches)})

    async def save_checkpoint(self, step: int, metrics: dict[str, float]) -> Path:
        self.saved.append(step)
        return self.root / f"step_{step}"


def test_minimal_protocol_backend_works(tmp_path: Path) -> None:
    backend: Any = SeedBackend(tmp_path)
    rows = run(run_sft_training, backend, build_samples(3), SFTTrainingConfig(3, 2, checkpoint_every=2))
    assert [row["loss"] for row in rows] == [2.0] * 3 and backend.saved == [2, 3]
    _, buffer, manager, _ = build_rl(tmp_path)

    class Engine:
        loaded: list[str] = []

        async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
            self.loaded.append(Path(checkpoint_path).name)
            return {"success": True}

    run(run_rl_training, backend, buffer, manager, [Engine()], RLTrainingConfig(num_steps=2, sync_every=2))
    assert Engine.loaded == ["step_0", "step_2"]


def test_advantages_and_batches() -> None:
    assert compute_advantages([1.0, 0.0], baseline=0.5) == [0.5, -0.5]
    samples = build_samples(4)
    batch = RolloutBatch.from_samples(samples)
    batch.group_indices = [0, 1, 0, 1]
    made = prepare_grpo_batch(batch, [1.0, 0.0, 0.0, 0.0], RLTrainingConfig(num_steps=1, baseline=0.25))
    assert made["advantages"].tolist() == [0.75, -0.25, -0.25, -0.25]
    assert {"input_ids", "labels", "loss_mask", "advantages"} <= made.keys()
    made = prepare_grpo_batch(batch, [1.0, 0.0, 0.0, 0.0], RLTrainingConfig(num_steps=1, estimator="mean"))
    assert made["advantages"].tolist() == [0.5, 0.0, -0.5, 0.0]
    columns = RolloutBatch(batch.tokens, batch.loss_masks, batch.rewards, batch.response_lengths)
    assert torch.equal(
        prepare_grpo_batch(columns, [0.0] * 4, RLTrainingConfig(num_steps=1))["labels"],
        prepare_sft_batch(samples)["labels"],
    )
    with pytest.raises(ValueError, match="2 rewards for 4 samples"):
        prepare_grpo_batch(batch, [1.0, 0.0], RLTrainingConfig(num_steps=1))
    with pytest.raises(ValueError, match="not finite"):
        prepare_grpo_batch(batch, [1.0, 0.0, float("nan"), 0.0], RLTrainingConfig(num_steps=1))
    assert compute_reward(Sample("p", metadata={"correct": True}, reward=0.2)) == 1.0
    assert compute_reward(Sample("p", metadata={"correct": False}, reward=0.2)) == 0.0
    assert compute_reward(Sample("p", reward=0.2)) == 0.2


def test_seats_and_parts_of_a_rollout_are_compared_as_such() -> None:
    """Rollout 0 has two samples of seat a; group 1 is one rollout of two samples: nothing to compare with."""
    rows = [(0, 0, "a", 1.0), (0, 0, "a", 1.0), (0, 0, "b", -1.0), (0, 1, "a", 0.0), (0, 1, "b", 4.0)]
    rows += [(1, 0, None, 5.0), (1, 0, None, 5.0)]
    samples = [
        Sample(str(i), tokens=[1, 2], loss_mask=[0.0, 1.0], reward=reward, group_index=group, index=index, seat=seat)
        for i, (group, index, seat, reward) in enumerate(rows)
    ]
    batch = RolloutBatch.from_samples(samples)

    def find(**options: Any) -> list[float]:
        made = prepare_grpo_batch(batch, batch.rewards, RLTrainingConfig(1, **options))
        return made["advantages"].tolist()  # type: ignore[no-any-return]

    assert find() == [0.5, 0.5, -2.5, -0.5, 2.5, 0, 0]
    assert find(estimator="length_weighted") == pytest.approx([1 / 3, 1 / 3, -2.5, -2 / 3, 2.5, 0, 0])
    seen = list[list[Any]]()

    def number(group: list[Sample]) -> list[float]:
        seen.append([sample.prompt for sample in group])
        return [float(i) for i in range(len(group))]

    assert find(advantage_fn=number) == [0, 0, 0, 1, 1, 0, 0]
    assert seen == [["1", "3"], ["2", "4"], ["6"]], "the last sample of each rollout"
    batch = RolloutBatch.from_samples(samples[5:])
    assert find() == [5.0, 5.0], "no groups: reward - baseline"


def test_an_unknown_verdict_leaves_the_reward() -> None:
    assert compute_reward(Sample("p", reward=0.7, metadata={"correct": None})) == 0.7
    for correct in ("False", float("nan")):
        with pytest.raises(ValueError, match=r'metadata\["correct"\] is .*: set it to True, False, or None'):
            compute_reward(Sample("p", metadata={"correct": correct}))


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: SFTTrainingConfig(0, 4), "num_steps 0 of SFTTrainingConfig"),
        (lambda: SFTTrainingConfig(1, 2.5), "batch_size 2.5"),
        (lambda: RolloutConfig(16 / 2), "batch_size 8.0 of RolloutConfig"),
        (lambda: RolloutConfig(1, 4 / 2), "n_samples_per_prompt 2.0"),
        (lambda: RolloutConfig(1, over_sampling_factor=float("nan")), "over_sampling_factor nan"),
        (lambda: RolloutConfig(1, over_sampling_factor=0.5), "over_sampling_factor 0.5"),
        (lambda: SFTTrainingConfig(1, 1, micro_batch_size=0), "micro_batch_size 0"),
        (lambda: RLTrainingConfig(1, sync_every=0), "sync_every 0"),
        (lambda: RLTrainingConfig(1, estimator="median"), "'median'"),
        (lambda: RLTrainingConfig(1, estimator="mean", baseline=0.5), "has no effect"),
        (lambda: RLTrainingConfig(1, advantage_std=True), "estimator that uses groups"),
    ],
)
def test_configs_that_are_refused(build: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build()


def test_documented_defaults() -> None:
    sft, rl = SFTTrainingConfig(1000, 4), RLTrainingConfig(1000)
    assert (sft.log_every, sft.checkpoint_every) == (100, 500)
    assert (rl.sync_every, rl.baseline, rl.log_every, rl.checkpoint_every) == (10, 0.0, 10, 100)


def test_sft_then_rl_over_one_directory(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    run(run_sft_training, build_backend(root), build_samples(4), SFTTrainingConfig(2, 4))
    backend, buffer, manager, policy = build_rl(root)
    run(backend.load_checkpoint, latest_checkpoint(root))
    run(run_rl_training, backend, buffer, manager, [policy], RLTrainingConfig(num_steps=1, sync_every=1))
    assert latest_checkpoint(root) == root / "step_3" and policy.loaded == ["step_2", "step_3"]
