"""Accounts of sampled tokens."""

from __future__ import annotations

import anyio
import pytest

from rollouts.training.datasets.data_buffer import DataBuffer
from rollouts.training.rollout_gen.async_rollout_manager import AsyncRolloutManager, GroupDropped, StalenessLimits
from rollouts.training.rollout_gen.groups import DropReason
from rollouts.training.rollout_gen.token_ledger import TokenLedger
from rollouts.training.types import RolloutConfig, Sample


def make_sample(num_sampled: int) -> Sample:
    return Sample("p", tokens=[1] * (num_sampled + 2), loss_mask=[0.0, 0.0] + [1.0] * num_sampled)


def test_each_fate_is_counted_once() -> None:
    ledger, samples = TokenLedger(), [make_sample(4), make_sample(6)]
    ledger.receive(0, 13)
    ledger.leave_unscored(0, 3)
    ledger.check([])
    ledger.settle(0)
    ledger.check(samples)
    ledger.receive(1, 5)
    ledger.drop(1, DropReason.HARD)
    ledger.emit(1, samples)
    ledger.drop_from_batch(1, samples[:1], DropReason.OVERLONG)
    assert ledger.count_in_flight([]) == 6
    ledger.release(1)
    ledger.check([])
    assert ledger.describe([]) == ("generated=18 trained=6 dropped=9 (hard 5, overlong 4) unscored=3 in_flight=0")


@pytest.mark.parametrize("ready", [[], [make_sample(4)] * 2])
def test_lost_or_duplicated_samples_are_detected(ready: list[Sample]) -> None:
    ledger = TokenLedger()
    ledger.receive(0, 4)
    ledger.settle(0)
    ledger.check([make_sample(4)])
    with pytest.raises(AssertionError, match="4 tokens were generated"):
        ledger.check(ready)


def test_resume_counts_open_work_as_trained_or_interrupted() -> None:
    ledger, resumed = TokenLedger(), TokenLedger()
    for group, num_tokens in enumerate([4, 5, 6]):
        ledger.receive(group, num_tokens)
    ledger.settle(0)
    ledger.settle(1)
    ledger.emit(1, [make_sample(4)])
    ready = [make_sample(5)]
    ledger.check(ready)
    resumed.load_state_dict(ledger.state_dict(), ready)
    resumed.check(ready)
    assert (resumed.trained, dict(resumed.dropped)) == (4, {"interrupted": 6})
    resumed.load_state_dict(None, ready)
    resumed.check(ready)
    assert resumed.generated == 5


@pytest.mark.parametrize("slots", [None, 6])
def test_rollout_manager_accounts_for_all_tokens(slots: int | None) -> None:
    async def generate(group_index: int, prompt: str) -> list[Sample]:
        if group_index % 5 == 0:
            raise GroupDropped(DropReason.TOO_FEW)
        return [make_sample(group_index % 3 + 1)]

    async def main() -> None:
        manager = AsyncRolloutManager(
            DataBuffer(["a", "b"]),
            RolloutConfig(3),
            generate_group=generate,
            group_filter=lambda samples: "short" if samples[0].response_length == 1 else None,
            slots=slots,
            max_batches=slots and 4,
        )
        async with manager:
            for step in range(1, 5):
                batch = await manager.generate_batch()
                assert manager.tokens.count_in_flight(manager.ready_samples) >= (0 if slots is None else 6)
                manager.tokens.check(manager.ready_samples)
                manager.release(step)
                manager.tokens.check(manager.ready_samples)
                assert len(batch.samples) == 3
        assert manager.tokens.trained > 0 and manager.tokens.dropped["short"] > 0

    anyio.run(main)


def test_tokens_of_stale_groups_are_dropped() -> None:
    async def generate(group_index: int, prompt: str) -> list[Sample]:
        sample = make_sample(2)
        sample.versions = [(2, 0)]
        return [sample]

    async def main() -> None:
        manager = AsyncRolloutManager(
            DataBuffer(["a", "b"]),
            RolloutConfig(1),
            generate_group=generate,
            slots=3,
            in_order=False,
            staleness_limits=StalenessLimits(max_staleness=0),
        )
        async with manager:
            await manager.wait_until_idle()
            await manager.generate_batch()  # of three ready groups, two become too old for the next version
            manager.tokens.check(manager.ready_samples)
            assert manager.tokens.dropped == {"stale": 4}

    anyio.run(main)
