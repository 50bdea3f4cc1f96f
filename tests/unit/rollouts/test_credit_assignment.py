"""A game of many turns with one late reward: advantages of a critic against group means, on a policy in a table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rollouts.training.advantages import compute_group_advantages
from rollouts.training.objectives import PRESETS
from rollouts.training.rl_losses import LossInputs, policy_loss
from rollouts.training.rl_losses.value import compute_gae, compute_value_losses, whiten

NUM_TURNS = 400
NUM_SIGNS = 32
GROUP = 4
MAX_STEPS = 1000
LR = 0.1
OBJECTIVE = replace(PRESETS["ppo"], dual_clip=None)


def play(policy: Tensor, num: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Signs, actions, and the part answered correctly before each turn, `[num, turns]`, and the reward at the end.

    In each turn a random sign is shown; its right answer is the action of the same number. The reward is the part of
    right answers of the whole game, so no turn is rewarded by itself.
    """
    signs = torch.randint(NUM_SIGNS, (num, NUM_TURNS), generator=generator)
    probs = policy.softmax(-1)[signs]
    actions = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view(num, NUM_TURNS)
    right = (signs == actions).double()
    return signs, actions, (right.cumsum(1) - right) / NUM_TURNS, right.mean(1)


def features(before: Tensor) -> Tensor:
    """What the value is linear in: the part answered correctly so far, the turns left, and 1."""
    left = (1 - torch.arange(NUM_TURNS, dtype=torch.float64) / NUM_TURNS).expand_as(before)
    return torch.stack((before, left, torch.ones_like(before)), dim=-1)


def count_rollouts(seed: int, *, with_critic: bool, target: float = 0.8) -> int:
    """Rollouts until the mean reward of a batch reaches the target."""
    generator = torch.Generator().manual_seed(seed)
    policy = torch.zeros(NUM_SIGNS, NUM_SIGNS, dtype=torch.float64, requires_grad=True)
    weights = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([{"params": [policy], "lr": LR}, {"params": [weights], "lr": 0.05}])
    sequence = torch.arange(GROUP).repeat_interleave(NUM_TURNS)
    for step in range(1, MAX_STEPS + 1):
        with torch.no_grad():
            signs, actions, before, reward = play(policy, GROUP, generator)
        if reward.mean() >= target:
            return step * GROUP
        if with_critic:
            states = features(before).flatten(0, 1)
            old = (states @ weights).detach()
            ends = torch.zeros(GROUP, NUM_TURNS, dtype=torch.float64)
            ends[:, -1] = reward
            raw, returns = compute_gae(ends.flatten().tolist(), old.tolist(), sequence.tolist(), 1.0, 0.5)
            advantages = torch.tensor(raw, dtype=torch.float64)
            losses, _ = compute_value_losses(states @ weights, old, old.new_tensor(returns))
            losses.mean().backward()
        else:
            advantages = torch.tensor(compute_group_advantages(reward.tolist()), dtype=torch.float64)[sequence]
        advantages = whiten(advantages, len(sequence), float(advantages.sum()), float(advantages.square().sum()))
        logprobs = policy.log_softmax(-1)[signs, actions].flatten()
        inputs = LossInputs(logprobs, logprobs.detach(), advantages, torch.ones_like(advantages), sequence)
        output = policy_loss(inputs, OBJECTIVE)
        (output.loss_sum / output.count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return MAX_STEPS * GROUP


@pytest.mark.slow
def test_gae_needs_fewer_rollouts_than_group_means() -> None:
    """Both estimates are whitened over the batch and drive the same loss and optimizer; five seeds."""
    critic, means = ([count_rollouts(seed, with_critic=flag) for seed in range(5)] for flag in (True, False))
    ratio = sum(means) / sum(critic)
    print(f"rollouts to a reward of 0.8, five seeds: GAE {critic}, group means {means}; ratio {ratio:.2f} (>= 2)")
    assert all(a < b for a, b in zip(critic, means, strict=True)) and ratio >= 2
