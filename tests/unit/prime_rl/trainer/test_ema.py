"""EMA weights: update, swap into the model, checkpoint, bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prime_rl.trainer.ckpt import load_checkpoint, save_checkpoint
from prime_rl.trainer.ema import WeightAverage
from prime_rl.trainer.optim import MasterWeights
from rollouts.training.backends.step import OptimizerStep

Parameters = dict[str, torch.Tensor]


def build_parameters(value: float) -> Parameters:
    return {name: torch.full((2, 3), value).requires_grad_() for name in ("a", "b")}


def test_average_matches_manual_computation() -> None:
    parameters = build_parameters(1.0)
    average = WeightAverage(parameters, 0.75)
    for value in (5.0, 9.0):
        for p in parameters.values():
            p.data.fill_(value)
        average.update()
    expected = 0.75 * (0.75 * 1 + 0.25 * 5) + 0.25 * 9
    assert all(torch.equal(mean, torch.full((2, 3), expected)) for mean in average.by_name.values())
    with average.in_place():
        assert parameters["a"][0, 0].item() == expected
    assert parameters["a"][0, 0].item() == 9.0
    with pytest.raises(RuntimeError, match="broken"), average.in_place():
        raise RuntimeError("broken")
    assert parameters["b"][0, 0].item() == 9.0, "the weights come back"


def test_average_of_bfloat16_model_is_float32() -> None:
    """1 + .001 rounds to 1 in bfloat16: the average still moves, and the model gets it rounded."""
    model = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.ones_(model.weight)
    masters = MasterWeights(model, torch.bfloat16)
    average = WeightAverage(masters.by_name, 0.999, masters.write_back)
    masters.by_name["weight"].data.fill_(2.0)
    masters.write_back()
    average.update()
    assert average.by_name["weight"][0, 0].item() == pytest.approx(1.001)
    for _ in range(1000):
        average.update()
    with average.in_place():
        assert model.weight.dtype == torch.bfloat16 and 1.6 < model.weight[0, 0].item() < 1.7
    assert model.weight[0, 0].item() == 2.0


def test_average_is_checkpointed(tmp_path: Path) -> None:
    parameters = build_parameters(1.0)
    stepper = OptimizerStep(torch.optim.SGD(parameters.values(), lr=0.5))
    average = WeightAverage(parameters, 0.9)

    def step(parameters: Parameters, stepper: OptimizerStep, average: WeightAverage) -> None:
        torch.stack([p.square().sum() for p in parameters.values()]).sum().backward()  # type: ignore[no-untyped-call]
        stepper.step()
        average.update()

    step(parameters, stepper, average)
    save_checkpoint(tmp_path, 1, parameters, stepper, {}, average=average.by_name)
    step(parameters, stepper, average)
    again = build_parameters(7.0)
    resumed, resumed_stepper = WeightAverage(again, 0.9), OptimizerStep(torch.optim.SGD(again.values(), lr=0.5))
    load_checkpoint(tmp_path, 1, again, resumed_stepper, average=resumed.by_name)
    step(again, resumed_stepper, resumed)
    assert all(torch.equal(resumed.by_name[name], mean) for name, mean in average.by_name.items())
    save_checkpoint(tmp_path, 2, parameters, stepper, {})
    with pytest.raises(ValueError, match="has no moving average"):
        load_checkpoint(tmp_path, 2, again, resumed_stepper, average=resumed.by_name)
