"""The optimizer of the trainer against torch's."""

from __future__ import annotations

from typing import Any

import torch

from prime_rl.trainer.optim import AdamW


def train(optimizer_cls: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Parameters and state after some steps, with a change of the learning rate and a restored state."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, 5, generator=generator)) for _ in range(2)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.0}]
    optimizer = optimizer_cls(groups, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(1, 5):
        optimizer.param_groups[0]["lr"] = 0.1 / step
        sum((p**3).sum() for p in parameters).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
    assert all(p.grad is None for p in parameters)
    return [p.detach() for p in parameters], optimizer.state_dict()


def test_adamw_is_that_of_torch_bit_for_bit() -> None:
    (ours, our_state), (theirs, their_state) = train(AdamW), train(torch.optim.AdamW)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert our_state["param_groups"] == their_state["param_groups"]
    for index, moments in their_state["state"].items():
        assert all(torch.equal(our_state["state"][index][name], value) for name, value in moments.items())
