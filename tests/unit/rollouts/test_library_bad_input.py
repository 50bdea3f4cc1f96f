"""Wrong input to the library is a `ValueError` or `TypeError` with the values and what to do, never an assertion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from rollouts.training import AsyncRolloutManager
from rollouts.training.advantages import compute_group_advantages
from rollouts.training.backends.checkpoint import read_checkpoint
from rollouts.training.batching import pack_samples, pad_samples
from rollouts.training.datasets import DataBuffer
from rollouts.training.rl_losses import grpo_loss, ppo_loss
from rollouts.training.types import RolloutConfig, Sample


def sample(**changes: Any) -> Sample:
    return Sample(**{"prompt": "p", "tokens": [1, 2, 3], "loss_mask": [0.0, 1.0, 1.0], **changes})


def generate(answer: Callable[[list[Any]], Any], **options: Any) -> Callable[[], Any]:
    """A batch of a manager whose generate_fn answers like this."""

    async def generate_fn(prompts: list[Any]) -> Any:
        return answer(prompts)

    def call() -> Any:
        config = RolloutConfig(1, generate_fn=generate_fn, **options)
        return anyio.run(AsyncRolloutManager(DataBuffer(["a"]), config).generate_batch)

    return call


def losses(mask: tuple[int, ...] = (2, 3), advantages: tuple[int, ...] = (2,), labels: tuple[int, ...] = (2, 3)) -> Any:
    return torch.zeros(2, 3, 4), torch.zeros(labels, dtype=torch.int64), torch.ones(mask), torch.ones(advantages)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    # ragged or mismatched streams
    "mask": (sample(loss_mask=[0.0]).validate, "3 tokens but 1 entries in `loss_mask`"),
    "log-probs": (sample(inference_logprobs=[0.0]).validate, "3 tokens but 1 entries in `inference_logprobs`"),
    "advantages": (sample(advantages=[0.0] * 4).validate, "3 tokens but 4 entries in `advantages`"),
    "no tokens": (sample(tokens=[]).validate, "no tokens"),
    "float tokens": (sample(tokens=[1.5, 2, 3]).validate, r"whole numbers, got \[1.5, 2, 3\]"),
    "negative mask": (sample(loss_mask=[-1.0, 1, 1]).validate, "holds -1.0"),
    "packed": (lambda: pack_samples([sample(loss_mask=[1.0])], 8), "3 tokens but 1 entries"),
    "padded": (lambda: pad_samples([sample(advantages=[1.0])]), "3 tokens but 1 entries"),
    "generated": (generate(lambda prompts: [sample(loss_mask=[1.0])]), "3 tokens but 1 entries"),
    "mask of a loss": (lambda: grpo_loss(*losses(mask=(2, 4))), r"loss_mask has shape \[2, 4\], logits \[2, 3, 4\]"),
    "advantages of a loss": (lambda: grpo_loss(*losses(advantages=(3,))), r"advantages have shape \[3\]"),
    "labels of a loss": (lambda: grpo_loss(*losses(labels=(2, 2))), r"labels have shape \[2, 2\]"),
    "old log-probs": (lambda: ppo_loss(*losses(), torch.zeros(2, 2)), r"old_log_probs have shape \[2, 2\]"),
    # values that are not finite
    "nan log-prob": (sample(inference_logprobs=[0.0, float("nan"), 0.0]).validate, "not finite"),
    "nan reward": (sample(reward=float("nan")).validate, "reward nan"),
    "nan rewards": (lambda: compute_group_advantages([1.0, float("nan")]), r"\[1.0, nan\] contain a value"),
    "nan reward_fn": (generate(lambda p: [sample()], reward_fn=lambda s: float("nan")), "reward nan of sample 0"),
    "no reward": (generate(lambda prompts: [sample()], reward_fn=lambda s: None), "reward_fn returned None"),
    "text reward": (generate(lambda p: [sample()], reward_fn=lambda s: "1.0"), "reward_fn returned '1.0'"),
    # prompts
    "no prompts": (lambda: DataBuffer([]).get_prompts(1), "the dataset is empty"),
    "one text": (lambda: DataBuffer("abc"), "prompts 'abc' are a str"),
    "nothing asked": (lambda: DataBuffer(["a"]).get_prompts(0), r"get_prompts\(0\)"),
    # groups of the wrong length
    "two for one": (generate(lambda prompts: [sample(), sample()]), "returned 2 samples for one prompt"),
    "no list": (generate(lambda prompts: "text"), "generate_fn returned a str"),
    "no sample": (generate(lambda prompts: [{"prompt": "p"}]), "a list with a dict"),
    # states of something else
    "foreign data": (lambda: DataBuffer(["a"]).load_state(DataBuffer(["b"]).save_state()), "other prompts"),
    "no state": (lambda: DataBuffer(["a"]).load_state({"seed": 1}), "lacks epoch_id, sample_offset"),
    "unknown field": (lambda: Sample.from_dict({"prompt": "p", "reweard": 1}), "reweard"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_named(name: str) -> None:
    call, sentence = CASES[name]
    with pytest.raises((ValueError, TypeError), match=sentence):
        call()


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"step": 1, "format": 99}')
    (tmp_path / "STABLE").touch()
    with pytest.raises(ValueError, match=r"format 99, this version reads"):
        read_checkpoint(tmp_path)
