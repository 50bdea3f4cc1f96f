"""A trainer of one process leaves torch's compiler asleep, and the algebra behind it: half of torch's own start."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from rollouts.training.backends.adamw import AdamW

ASLEEP = ("torch._dynamo", "torch._inductor", "sympy", "torch.distributed.tensor", "torch.distributed.pipelining")
ASLEEP += ("torch.distributed.fsdp", "transformers", "verifiers", "datasets", "wandb")
MAX_MODULES = 1600
"""torch has 1,100 of them."""
LOOK = """
import sys
import prime_rl.trainer.rl.train, prime_rl.trainer.session
print(*(name for name in {asleep} if name in sys.modules))
print(len(sys.modules))
"""


def test_a_trainer_wakes_no_compiler() -> None:
    code = LOOK.format(asleep=ASLEEP)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    awake, num_modules = done.stdout.splitlines()
    assert not awake and int(num_modules) <= MAX_MODULES


def train(optimizer_cls: Any, num_steps: int = 4) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Some steps on the cubes of parameters, the learning rate changed on the way."""
    random = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, 5, generator=random)) for _ in range(2)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.0}]
    optimizer = optimizer_cls(groups, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        torch.stack([(p**3).sum() for p in parameters]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.grad is None for p in parameters)
    return [p.detach() for p in parameters], optimizer


def test_our_adamw_is_torchs_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, their = train(torch.optim.AdamW)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch._dynamo", None)  # to import it is an error now
        got, our = train(AdamW)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    states = [optimizer.state_dict() for optimizer in (our, their)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for name, value in states[0]["state"][1].items():
        assert torch.equal(value, states[1]["state"][1][name]), name


def test_a_scheduler_and_hooks_work_on_our_adamw() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer, seen = AdamW([parameter], lr=1.0), []
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer.register_step_post_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
    for _ in range(3):
        parameter.grad = torch.ones(2)
        optimizer.step()
        schedule.step()
    assert seen == [1.0, 0.5, pytest.approx(1 / 3)]
