"""The canary: engines are held to the trainer's log-probs of one prompt, and planted differences end the run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import torch
from running_server import RunningServer

from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.engine import AdapterSpec, GenerationRequest, Output, SamplingParams
from prime_rl.orchestrator.canary import CanaryCheck
from prime_rl.orchestrator.weight_relay import WeightRelay
from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.models.causal_lm import tensor_names
from prime_rl.trainer.models.registry import load_decoder
from prime_rl.transport.canary import CANARY_FILE, CANARY_TOKENS, Canary, compare_canary, read_canary
from prime_rl.transport.weights import digest_tensor, publish_weights
from prime_rl.utils.tokenizer import resolve_model_dir
from rollouts.training import native
from rollouts.training.batching import pack_samples
from rollouts.training.rl_losses import nll_loss
from rollouts.training.steps import step_path
from rollouts.training.types import Sample
from rollouts.training.weight_sync import PrimeEngine, WeightSyncError, sync_weights_to_engines


@pytest.fixture(scope="module")
def backend() -> Backend:
    model = {"name": "tiny-qwen3", "debug": {"random_init": True, "seed": 5}}
    return build_backend(TrainConfig.model_validate({"model": model}))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = RunningServer(tmp_path_factory.mktemp("outputs"))
    yield running
    running.stop()


def publish(backend: Backend, root: Path, step: int, canary: Canary | None = None) -> Path:
    shutil.rmtree(step_path(root, step), ignore_errors=True)
    canary = canary or backend.compute_canary(step)
    return publish_weights(root, step, backend.publishable(), backend.model_dir, canary=canary)


async def load_and_check(server: RunningServer, path: Path, step: int, check: CanaryCheck) -> None:
    engines = [PrimeEngine(server.root)]
    answers = await sync_weights_to_engines(engines, str(path))
    await check.check(step, path, engines, answers)


def weights_dir(server: RunningServer) -> Path:
    assert server.config.output_dir is not None
    return server.config.output_dir / "weights"


def test_an_exact_engine_repeats_the_trainer_bit_for_bit(backend: Backend, server: RunningServer) -> None:
    canary = read_canary(publish(backend, weights_dir(server), 1))
    assert canary is not None and canary.exact and len(canary.logprobs) == CANARY_TOKENS - 1
    check = CanaryCheck(10)
    anyio.run(load_and_check, server, step_path(weights_dir(server), 1), 1, check)
    assert check.num_checked == 1
    logprobs = anyio.run(PrimeEngine(server.root).score_prompt, canary.token_ids)
    assert logprobs == canary.logprobs


@pytest.mark.parametrize("lora", [None, {"rank": 2, "merge": False}])
def test_bfloat16_is_as_exact_where_float32_is_computed(
    lora: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A step of training, its weights in the engine, and the same bits."""
    monkeypatch.setattr(native, "has_bf16_unit", lambda: False)
    base = tmp_path / "base"
    tiny = resolve_model_dir("tiny-qwen3")
    publish_weights(base, 0, tensor_names(load_decoder(tiny, random_init=True, seed=5)), tiny)
    values = {"name": str(base / "step_0"), "dtype": "bfloat16", "lora": lora}
    backend = build_backend(TrainConfig.model_validate({"model": values}))
    sample = Sample("", tokens=list(range(20)), loss_mask=[0.0] + [1.0] * 19)
    backend.optim_step(backend.forward_backward(pack_samples([sample], 32)[0], nll_loss))
    canary, published = backend.compute_canary(1), backend.publishable()
    assert canary.exact == (lora is None) and {t.dtype for t in published.values()} == {torch.bfloat16}
    engine = EmbeddedEngine(load_decoder(base / "step_0", dtype=torch.bfloat16))
    name = None if lora is None else "a"
    if name is None:
        digests = engine.load_weights(published, 1)
    else:
        digests = engine.load_adapter(name, published, AdapterSpec(2, 32.0, 1))
    assert digests == {key: digest_tensor(tensor) for key, tensor in published.items()}
    engine.add(GenerationRequest(canary.token_ids, SamplingParams(max_tokens=0, prompt_logprobs=0), adapter=name))
    (output,) = engine.step()
    assert isinstance(output, Output) and output.prompt_logprobs is not None
    assert output.prompt_logprobs.logprobs == canary.logprobs


def test_a_difference_of_one_bit_pauses_the_engine_and_says_what_differs(
    backend: Backend, server: RunningServer
) -> None:
    good = backend.compute_canary(2)
    planted = list(good.logprobs)
    planted[3] = float(torch.nextafter(torch.tensor(planted[3]), torch.tensor(0.0)))
    path = publish(backend, weights_dir(server), 2, msgspec.structs.replace(good, logprobs=planted))
    with pytest.raises(WeightSyncError, match=r"differ in exact mode: token 4 has .* \(the engine is paused\)"):
        anyio.run(load_and_check, server, path, 2, CanaryCheck(1))
    assert server.http.get("/is_paused").json() == {"is_paused": True}
    server.post("/resume", {})


def test_the_first_version_is_checked_and_then_every_so_many(backend: Backend, server: RunningServer) -> None:
    check = CanaryCheck(3)
    counts = []
    for step in range(3, 9):
        path = publish(backend, weights_dir(server), step)
        anyio.run(load_and_check, server, path, step, check)
        counts.append(check.num_checked)
    assert counts == [1, 1, 1, 2, 2, 2]
    none = CanaryCheck(None)
    anyio.run(load_and_check, server, path, 8, none)
    (path / CANARY_FILE).unlink()
    anyio.run(load_and_check, server, path, 8, check)
    assert (none.num_checked, check.num_checked) == (0, 2), "switched off, or published without one"


def test_the_relay_frees_no_slot_for_a_version_that_differs(backend: Backend, server: RunningServer) -> None:
    root = weights_dir(server)
    good = backend.compute_canary(20)
    publish(backend, root, 20)
    publish(backend, root, 21, msgspec.structs.replace(good, logprobs=[x - 1 for x in good.logprobs]))
    live: list[int] = []

    async def main() -> None:
        relay = WeightRelay(
            root,
            [PrimeEngine(server.root)],
            version=0,
            on_live=live.append,
            is_received=lambda step: True,
            timeout_s=30,
            log_timeline=lambda *interval: None,
            canary_interval=1,
        )
        relay.sent(30)
        await relay.load(20)
        await relay.load(21)

    with pytest.raises(WeightSyncError, match="canary"):
        anyio.run(main)
    assert live == [20]
    server.post("/resume", {})


def test_what_rounding_explains_is_allowed() -> None:
    canary = Canary(1, 1, list(range(5)), [-1.0, -2.0, -3.0, -4.0], "float32", True)
    near = [x + 2e-4 for x in canary.logprobs]
    assert compare_canary(canary, near) is None
    assert "exact mode" in str(compare_canary(canary, near, exact=True))
    assert compare_canary(msgspec.structs.replace(canary, exact=False), near, exact=True) is None
    assert compare_canary(canary, near, exact=True, dtype="bfloat16") is None, "another format cannot be exact"
    far = [x + 0.05 for x in canary.logprobs]
    assert "0.001 is allowed" in str(compare_canary(canary, far))
    assert compare_canary(canary, far, dtype="bfloat16") is None
    assert "0.1 is allowed" in str(compare_canary(canary, [0.0] * 4, dtype="bfloat16"))
    assert compare_canary(canary, [float("nan")] * 4) is not None
    assert "told 3" in str(compare_canary(canary, near[:3]))


def test_a_canary_of_another_edition_is_refused(tmp_path: Path) -> None:
    assert read_canary(tmp_path) is None
    (tmp_path / CANARY_FILE).write_text(
        '{"schema": 9, "step": 1, "token_ids": [], "logprobs": [], "dtype": "", "exact": true}'
    )
    with pytest.raises(ValueError, match="schema 9"):
        read_canary(tmp_path)
    (tmp_path / CANARY_FILE).write_text("{")
    with pytest.raises(ValueError, match="no canary"):
        read_canary(tmp_path)


def test_the_trainers_number_format_goes_along(backend: Backend) -> None:
    narrow = replace(backend, placement=replace(backend.placement, dtype=torch.bfloat16, attn="sdpa"))
    assert (narrow.compute_canary(1).dtype, narrow.compute_canary(1).exact) == ("bfloat16", False)
