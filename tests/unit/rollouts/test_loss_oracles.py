"""Losses and advantages against other frameworks: recorded values, and the frameworks if installed."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rollouts.training.advantages import compute_batch_advantages, compute_decoupled_advantages
from rollouts.training.objectives import PRESETS, Objective
from rollouts.training.rl_losses import LossInputs, policy_loss
from rollouts.training.rl_losses.normalize import flatten_rows
from rollouts.training.rl_losses.value import compute_gae, compute_value_losses, whiten

ROOT = Path(__file__).parents[3]
TOLERANCE = 1e-9


@cache
def maker() -> ModuleType:
    """The script that made the golden vectors, with its table of oracles."""
    path = ROOT / "dev" / "make_golden_losses.py"
    spec = importlib.util.spec_from_file_location("make_golden_losses", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def golden() -> dict[str, Any]:
    """The file of golden vectors."""
    data: dict[str, Any] = json.loads((ROOT / "tests" / "unit" / "golden" / "losses.json").read_text())
    return data


def objective_of(case: str) -> Objective:
    """The preset that a case's name begins with, with the choices of the case."""
    name = max((n for n in PRESETS if case == n or case.startswith(f"{n}_")), key=len)
    row = replace(PRESETS[name], **maker().CASES[case])
    return replace(row, max_tokens=maker().MAX_TOKENS) if row.loss_aggregation == "constant" else row


def ours(case: str, streams: dict[str, Tensor]) -> tuple[float, Tensor]:
    """Value of our loss, and its gradient at the loss tokens."""
    trainer = streams["trainer"].clone().requires_grad_()
    mask = streams["mask"]
    advantages = streams["advantages"][:, None].expand_as(mask)
    inputs = flatten_rows(trainer, mask, streams["inference"], advantages, streams["reference"])
    output = policy_loss(inputs, objective_of(case))
    loss = output.loss_sum / output.count
    [gradient] = torch.autograd.grad(loss, trainer)
    assert torch.all(gradient[mask == 0] == 0)
    return loss.item(), gradient[mask > 0]


def agree(case: str, oracle: str, streams: dict[str, Tensor], value: float, gradient: Tensor) -> None:
    found, found_gradient = ours(case, streams)
    if not oracle.endswith("gradient"):
        assert found == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE)
    scale = max(1.0, gradient.abs().max().item())
    assert (found_gradient - gradient).abs().max().item() <= TOLERANCE * scale


def pairs() -> list[tuple[str, str]]:
    return [(case, oracle) for case, oracles in golden()["losses"].items() for oracle in oracles]


@pytest.mark.parametrize(("case", "oracle"), pairs())
def test_golden_vectors(case: str, oracle: str) -> None:
    """Value and gradient in fp64, to 1e-9, on log-probs near the sampler's, far from them, and all but equal."""
    for kind, row in golden()["losses"][case][oracle].items():
        streams = {name: torch.tensor(s, dtype=torch.float64) for name, s in golden()["streams"][kind].items()}
        agree(case, oracle, streams, row["value"], torch.tensor(row["gradient"], dtype=torch.float64))


def test_every_preset_has_golden_vectors() -> None:
    assert set(golden()["losses"]) == set(maker().CASES) >= set(PRESETS) - {"custom"} - set(golden()["distillation"])
    three = ("grpo", "gspo", "cispo", "ppo", "dapo", "dr_grpo", "sapo")
    assert [len(golden()["losses"][name]) for name in three] == [3] * 7
    assert [len(golden()["losses"][name]) for name in ("luspo", "gmpo", "vespo")] == [2] * 3


def distillation_pairs() -> list[tuple[str, str]]:
    return [(name, oracle) for name, oracles in golden()["distillation"].items() for oracle in oracles]


def agree_on_distillation(name: str, streams: dict[str, Tensor], expected: dict[str, Any]) -> None:
    row, chosen = PRESETS[name], streams["mask"] > 0
    logits = streams["student"].clone().requires_grad_()
    student, teacher = (torch.log_softmax(x, -1)[chosen] for x in (logits, streams["teacher"]))
    tokens = streams["tokens"][chosen].long()[:, None]
    trainer, of_teacher = (table.gather(-1, tokens).squeeze(-1) for table in (student, teacher))
    if has_tail := row.distill.estimator == "topk+tail":
        ids = teacher.topk(maker().TOP_K).indices
        student, teacher = (
            torch.cat((x.gather(-1, ids), x.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)), -1)
            for x in (student, teacher)
        )
    inputs = LossInputs(
        trainer,
        streams["inference"][chosen],
        streams["advantages"][:, None].expand_as(chosen)[chosen],
        torch.ones_like(trainer),
        torch.arange(len(chosen))[:, None].expand_as(chosen)[chosen],
        teacher_logprobs=of_teacher,
        student_table=student,
        teacher_table=teacher,
        has_tail=has_tail,
    )
    output = policy_loss(inputs, row)
    loss = output.loss_sum / output.count
    [gradient] = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx(expected["value"], abs=TOLERANCE, rel=TOLERANCE)
    theirs = torch.tensor(expected["gradient"], dtype=torch.float64)
    assert theirs.abs().max() > 1e-3 and (gradient[chosen] - theirs).abs().max() <= TOLERANCE


@pytest.mark.parametrize(("name", "oracle"), distillation_pairs())
def test_golden_self_distillation(name: str, oracle: str) -> None:
    """Value, and gradient by the student's logits, to 1e-9."""
    streams = {key: torch.tensor(s, dtype=torch.float64) for key, s in golden()["distillation_streams"].items()}
    agree_on_distillation(name, streams, golden()["distillation"][name][oracle])


def test_golden_advantages_of_several_rewards() -> None:
    """GDPO; verl's mean has 1e-8 in its denominator, which is 1e-9 of a batch of 8."""
    rewards, weights = maker().COMPONENTS, maker().WEIGHTS
    found = compute_decoupled_advantages(list(rewards.values()), list(weights.values()))
    for row, expected in zip(found, golden()["decoupled_advantages"]["verl"], strict=True):
        assert row == pytest.approx(expected, abs=2e-9)


@pytest.mark.parametrize("oracle", ["verl", "verl gaps", "skyrl"])
def test_golden_critic(oracle: str) -> None:
    """GAE, returns, value loss and its gradient, with tokens of the environment in between ("gaps")."""
    streams = {name: torch.tensor(s, dtype=torch.float64) for name, s in golden()["critic_streams"].items()}
    expected, mask = golden()["critic"][oracle], streams["gaps" if oracle.endswith("gaps") else "mask"] > 0
    rewards, old, new = (streams[name][mask] for name in ("rewards", "old", "new"))
    sequence = torch.arange(len(mask))[:, None].expand_as(mask)[mask].tolist()
    advantages, returns = compute_gae(rewards.tolist(), old.tolist(), sequence, maker().GAMMA, maker().GAE_LAMBDA)
    assert returns == pytest.approx(expected["returns"], abs=TOLERANCE)
    raw = torch.tensor(advantages, dtype=torch.float64)
    whitened = whiten(raw, len(raw), float(raw.sum()), float(raw.square().sum()))
    assert whitened.tolist() == pytest.approx(expected["advantages"], abs=TOLERANCE)
    new.requires_grad_()
    losses, _ = compute_value_losses(new, old, torch.tensor(returns, dtype=torch.float64), maker().VALUE_CLIP)
    losses.mean().backward()
    assert losses.mean().item() == pytest.approx(expected["loss"], abs=TOLERANCE) and new.grad is not None
    assert new.grad.tolist() == pytest.approx(expected["gradient"], abs=TOLERANCE)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "maxrl"])
def test_golden_advantages(name: str) -> None:
    options, _ = maker().ADVANTAGES[name]
    lengths = maker().RESPONSE_LENGTHS
    found = compute_batch_advantages(maker().REWARDS, lengths=lengths, **options)
    for row, expected in zip(found, golden()["advantages"][name], strict=True):
        assert row == pytest.approx(expected, abs=TOLERANCE)
    choice = PRESETS[name].advantage
    assert (choice.baseline, choice.std) == (options["baseline"], options.get("std", "none"))


@pytest.mark.parametrize(("case", "oracle"), [pair for pair in pairs() if not pair[1].startswith("prime-rl")])
def test_the_oracles_themselves(case: str, oracle: str) -> None:
    """The comparison of the golden vectors on fresh numbers, with the installed packages (prime-rl has no wheel)."""
    package = oracle.split()[0]
    if importlib.util.find_spec({"liger": "liger_kernel"}.get(package, package)) is None:
        pytest.skip(f"{package} is not installed; cure: make test-peers")
    for seed in range(3):
        generator = torch.Generator().manual_seed(100 + seed)
        for kind in maker().SPREADS:
            streams = maker().draw_streams(kind)
            streams["advantages"] = torch.randn(streams["advantages"].shape, generator=generator, dtype=torch.float64)
            value, gradient = maker().run_oracle(maker().ORACLES[case][oracle], streams)
            agree(case, oracle, streams, value, gradient[streams["mask"] > 0])


@pytest.mark.parametrize(("name", "oracle"), distillation_pairs())
def test_the_distillation_oracles_themselves(name: str, oracle: str) -> None:
    """The same on fresh numbers."""
    for package in {"trl", *oracle.split()} & {"trl", "verl"}:
        pytest.importorskip(package, reason=f"{package} is not installed; cure: make test-peers")
    for seed in range(100, 103):
        streams = maker().draw_distillation(seed)
        expected = maker().run_distillation(maker().DISTILLATION[name][oracle], streams)
        agree_on_distillation(name, streams, expected)
