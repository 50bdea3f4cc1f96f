"""The canary: engine log-probs of a few prompts are compared with the trainer's, and injected faults end the run."""

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
from prime_rl.orchestrator.canary_check import CanaryCheck, CanaryMismatch
from prime_rl.orchestrator.policy_version import PolicyVersion
from prime_rl.orchestrator.server_pool import ServerPool
from prime_rl.orchestrator.servers import read_health
from prime_rl.orchestrator.weight_relay import WeightRelay
from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.models.causal_lm import tensor_names
from prime_rl.trainer.models.registry import load_decoder
from prime_rl.transport.canary import (
    CANARY_FILE,
    MAX_PROMPT_TOKENS,
    PEAK,
    Canary,
    build_canary,
    canary_prompts,
    compare_canary,
    read_canary,
)
from prime_rl.transport.weights import publish_weights
from prime_rl.utils.client import InferenceClient
from rollouts.training.batching import pack_samples
from rollouts.training.manifests import digest_tensor
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
    return publish_weights(root, step, backend.export_state_dict(), backend.model_dir, canary=canary)


async def load_and_check(server: RunningServer, path: Path, step: int, check: CanaryCheck) -> None:
    engines = [PrimeEngine(server.root)]
    answers = await sync_weights_to_engines(engines, str(path))
    await check.check(step, path, engines, answers)


def score(engine: EmbeddedEngine, canary: Canary, adapter: str | None = None) -> list[list[float]]:
    found = []
    for prompt in canary.prompts:
        engine.add(
            GenerationRequest(prompt.token_ids, SamplingParams(max_tokens=0, prompt_logprobs=0), adapter=adapter)
        )
        (output,) = engine.step()
        assert isinstance(output, Output) and output.prompt_logprobs is not None
        found.append(output.prompt_logprobs.logprobs)
    return found


def with_logprobs(canary: Canary, rows: list[list[float]]) -> Canary:
    prompts = [p.token_ids for p in canary.prompts]
    return build_canary(canary.step, prompts, rows, canary.dtype, canary.exact, canary.noise)


def plant_fault(server: RunningServer) -> None:
    """Scale one norm of the running engine, whose digests have been compared."""
    engine = server.service.engine.engine
    assert isinstance(engine, EmbeddedEngine)
    changed = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    changed["model.layers.1.post_attention_layernorm.weight"] *= 1.05
    engine.load_weights(changed, server.service.version)


def weights_dir(server: RunningServer) -> Path:
    assert server.config.output_dir is not None
    return server.config.output_dir / "weights"


def test_an_exact_engine_repeats_the_trainer_bit_for_bit(backend: Backend, server: RunningServer) -> None:
    canary = read_canary(publish(backend, weights_dir(server), 1))
    assert canary is not None and canary.exact
    assert [len(prompt.token_ids) for prompt in canary.prompts] == [8, 16, 32]
    check = CanaryCheck(10)
    anyio.run(load_and_check, server, step_path(weights_dir(server), 1), 1, check)
    assert check.num_checked == 1
    for prompt in canary.prompts:
        assert anyio.run(PrimeEngine(server.root).score_prompt, prompt.token_ids) == prompt.logprobs


@pytest.mark.parametrize("lora", [None, {"rank": 2, "merge": False}])
def test_bfloat16_is_as_exact_as_float32(lora: dict[str, Any] | None, tmp_path: Path) -> None:
    """A step of training, its weights in the engine, and the same bits."""
    base = tmp_path / "base"
    tiny = resolve_model_dir("tiny-qwen3")
    publish_weights(base, 0, tensor_names(load_decoder(tiny, random_init=True, seed=5)), tiny)
    values = {"name": str(base / "step_0"), "dtype": "bfloat16", "lora": lora}
    backend = build_backend(TrainConfig.model_validate({"model": values}))
    sample = Sample("", tokens=list(range(20)), loss_mask=[0.0] + [1.0] * 19)
    backend.optim_step(backend.forward_backward(pack_samples([sample], 32)[0], nll_loss))
    canary, published = backend.compute_canary(1, [sample.tokens]), backend.export_state_dict()
    assert canary.exact == (lora is None) and {t.dtype for t in published.values()} == {torch.bfloat16}
    engine = EmbeddedEngine(load_decoder(base / "step_0", dtype=torch.bfloat16))
    name = None if lora is None else "a"
    if name is None:
        digests = engine.load_weights(published, 1)()
    else:
        digests = engine.load_adapter(name, published, AdapterSpec(2, 32.0, 1))
    assert digests == {key: digest_tensor(tensor) for key, tensor in published.items()}
    assert score(engine, canary, name) == canary.logprobs


def test_one_flipped_bit_pauses_the_engine_and_is_described(backend: Backend, server: RunningServer) -> None:
    good = backend.compute_canary(2)
    planted = [list(row) for row in good.logprobs]
    planted[1][3] = float(torch.nextafter(torch.tensor(planted[1][3]), torch.tensor(0.0)))
    path = publish(backend, weights_dir(server), 2, with_logprobs(good, planted))
    with pytest.raises(CanaryMismatch, match=r"token 4 of prompt 2 has .* \(the engine is paused\)"):
        anyio.run(load_and_check, server, path, 2, CanaryCheck(1))
    assert server.http.get("/is_paused").json() == {"is_paused": True}
    server.post("/resume", {})


def test_first_versions_are_checked_then_every_interval(backend: Backend, server: RunningServer) -> None:
    check = CanaryCheck(3)
    counts = []
    for step in range(3, 9):
        path = publish(backend, weights_dir(server), step)
        anyio.run(load_and_check, server, path, step, check)
        counts.append(check.num_checked)
    assert counts == [1, 2, 3, 3, 3, 4]
    none = CanaryCheck(None)
    anyio.run(load_and_check, server, path, 8, none)
    (path / CANARY_FILE).unlink()
    anyio.run(load_and_check, server, path, 8, check)
    assert (none.num_checked, check.num_checked) == (0, 4), "switched off, or published without one"


def test_a_mismatching_version_releases_no_slots(backend: Backend, server: RunningServer) -> None:
    root = weights_dir(server)
    good = backend.compute_canary(20)
    publish(backend, root, 20)
    publish(backend, root, 21, with_logprobs(good, [[x - 1 for x in row] for row in good.logprobs]))
    live: list[int] = []

    async def main() -> None:
        servers = ServerPool([], [PrimeEngine(server.root)], PolicyVersion(), root, canary=CanaryCheck(1))
        servers.version.subscribe(lambda version: live.append(version.live))
        relay = WeightRelay(servers, is_received=lambda step: True, timeout_s=30, log_timeline=lambda *interval: None)
        relay.mark_sent(30)
        await relay.load(20)
        await relay.load(21)

    with pytest.raises(WeightSyncError, match="canary"):
        anyio.run(main)
    assert live == [20]
    server.post("/resume", {})


def test_rounding_differences_are_allowed() -> None:
    rows = [[-1.0, -2.0, -3.0, -4.0], [-5.0, -6.0]]
    canary = build_canary(1, [list(range(5)), [1, 2, 3]], rows, "float32", True)

    def moved(by: float) -> list[list[float] | None]:
        return [[x + by for x in row] for row in rows]

    assert compare_canary(canary, moved(2e-5)) is None
    assert "5e-05 is allowed" in str(compare_canary(canary, moved(2e-4)))
    assert "exact mode" in str(compare_canary(canary, moved(1e-9), exact=True))
    assert compare_canary(msgspec.structs.replace(canary, exact=False), moved(2e-5), exact=True) is None
    noisy = msgspec.structs.replace(canary, noise=1e-5)
    assert compare_canary(noisy, moved(2e-4)) is None and "0.00032 is allowed" in str(
        compare_canary(noisy, moved(4e-4))
    )
    assert "0.001 is allowed" in str(compare_canary(msgspec.structs.replace(noisy, noise=1.0), moved(2e-3)))
    assert compare_canary(canary, moved(0.05), exact=True, dtype="bfloat16") is None, "another format cannot be exact"
    assert "0.1 is allowed" in str(compare_canary(canary, moved(0.2), dtype="bfloat16"))
    narrow = msgspec.structs.replace(canary, dtype="bfloat16", exact=False)
    assert compare_canary(narrow, moved(0.04)) is None
    assert "0.05 is allowed" in str(compare_canary(narrow, moved(0.06)))
    rounded = msgspec.structs.replace(narrow, exact=True, arithmetic="amx_bf16")
    same = {"exact": True, "dtype": "bfloat16", "arithmetic": "amx_bf16"}
    assert "exact mode" in str(compare_canary(rounded, moved(1e-9), **same))
    for other in ("avx512_bf16", ""):
        assert compare_canary(rounded, moved(0.04), **same | {"arithmetic": other}) is None, "other bits on that CPU"


def test_one_distant_log_prob_is_a_mismatch() -> None:
    row = [-1.0] * 1000
    canary = build_canary(1, [[0] * 1001], [row], "float32", False)
    planted = [*row[1:], -1.0 - 2 * PEAK * canary.limit()]
    assert "one log-prob of the canary is off by 0.002" in str(compare_canary(canary, [planted]))
    routed = msgspec.structs.replace(canary, routed=True)
    assert compare_canary(routed, [planted]) is None, "rounding may select another expert"


def test_rounding_may_move_unlikely_tokens_further() -> None:
    """As in RL of SmolLM2-135M in bfloat16, where a token had -20.235 in the engine and -21.321 in the trainer."""
    canary = build_canary(1, [[0] * 1001], [[-1.0] * 999 + [-21.321]], "bfloat16", False)
    assert compare_canary(canary, [[-1.0] * 999 + [-20.235]]) is None
    assert compare_canary(canary, [[-1.0] * 998 + [-2.086, -21.321]]) == (
        "one log-prob of the canary is off by 1.086, 1 is allowed: "
        "token 999 of prompt 1 has -2.086000 in the engine and -1.000000 in the trainer"
    )
    assert "off by 2.321, 2.132 is allowed" in str(compare_canary(canary, [[-1.0] * 999 + [-19.0]]))


def test_nan_or_missing_logprobs_are_a_mismatch() -> None:
    canary = build_canary(1, [[1, 2, 3], [4, 5]], [[-1.0, -2.0], [-3.0]], "float32", True)
    for exact in (False, True):
        assert compare_canary(canary, [[-1.0, float("nan")], [-3.0]], exact=exact) is not None
        assert "has 2 log-probs, the engine returned 1" in str(compare_canary(canary, [[-1.0], [-3.0]], exact=exact))
        assert compare_canary(canary, [None, [-3.0]], exact=exact) is None
        assert "scored no prompt" in str(compare_canary(canary, [None, None], exact=exact))


def test_prompts_cover_lengths_and_tokens_of_the_batch() -> None:
    texts = [[i, i + 1, *range(100, 200)] for i in range(0, 80, 2)]
    prompts = canary_prompts(1000, texts)
    assert prompts == canary_prompts(1000, texts) and [len(p) for p in prompts[:5]] == [8, 16, 32, 64, 64]
    with_successor = {token for prompt in prompts for token in prompt[:-1]}
    assert with_successor >= {token for text in texts for token in text}, "every token changes a log-prob"
    many = canary_prompts(100_000, [list(range(5000))])
    assert sum(map(len, many)) < 350 and max(map(len, many)) <= MAX_PROMPT_TOKENS
    short = canary_prompts(320, [[5, 6, 7], [9]])
    assert [len(p) for p in short[:3]] == [8, 16, 32] and all(len(p) == 2 for p in short[3:])
    assert canary_prompts(320, [[1]]) == canary_prompts(320)


FAULTS = {
    "norm x 1.05": ("model.layers.1.post_attention_layernorm.weight", slice(None), 1.05),
    "norm x 1.01": ("model.layers.1.self_attn.q_norm.weight", slice(None), 1.01),
    "last norm x 1.01": ("model.norm.weight", slice(None), 1.01),
    "row of a prompt token": ("model.embed_tokens.weight", 65, 1.05),
}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_after_the_digests_is_found(backend: Backend, fault: str, exact: bool) -> None:
    """The engine holds what was published; then one tensor of it changes."""
    canary, published = backend.compute_canary(1, [[65, 66, 67, 68] * 5]), backend.export_state_dict()
    engine = EmbeddedEngine(load_decoder(backend.model_dir, random_init=True, seed=9), exact=exact)
    assert engine.load_weights(published, 1)() == {key: digest_tensor(tensor) for key, tensor in published.items()}
    assert compare_canary(canary, score(engine, canary), exact=exact, dtype="float32") is None
    name, rows, factor = FAULTS[fault]
    changed = {key: tensor.clone() for key, tensor in published.items()}
    changed[name][rows] *= factor
    engine.load_weights(changed, 1)
    assert compare_canary(canary, score(engine, canary), exact=exact, dtype="float32") is not None


@pytest.mark.parametrize("matrix", ["lora_A", "lora_B"])
def test_a_fault_in_an_adapter_is_found(matrix: str) -> None:
    values = {"name": "tiny-qwen3", "debug": {"random_init": True, "seed": 5}, "lora": {"rank": 4, "alpha": 8}}
    backend = build_backend(TrainConfig.model_validate({"model": values}))
    with torch.no_grad():
        for name, parameter in backend.parameters.items():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    canary, published = backend.compute_canary(1, [[65, 66, 67, 68] * 5]), backend.export_state_dict()
    engine = EmbeddedEngine(load_decoder(backend.model_dir, random_init=True, seed=5))
    engine.load_adapter("a", published, AdapterSpec(4, 8.0, 1))
    assert compare_canary(canary, score(engine, canary, "a"), exact=True, dtype="float32") is None
    changed = {key: tensor.clone() for key, tensor in published.items()}
    changed[next(name for name in changed if matrix in name)] *= 1.05
    engine.load_adapter("a", changed, AdapterSpec(4, 8.0, 1))
    assert compare_canary(canary, score(engine, canary, "a"), exact=True, dtype="float32") is not None


def test_a_planted_fault_is_found_at_the_first_version(backend: Backend, server: RunningServer) -> None:
    path = publish(backend, weights_dir(server), 30)

    async def main() -> None:
        engines, check = [PrimeEngine(server.root)], CanaryCheck(1000)
        answers = await sync_weights_to_engines(engines, str(path))
        plant_fault(server)
        await check.check(30, path, engines, [{**answers[0], "exact": False}])

    with pytest.raises(CanaryMismatch, match=r"off by .* 5e-05 is allowed"):
        anyio.run(main)
    server.post("/resume", {})


def test_a_restarted_server_is_compared_whatever_the_interval(backend: Backend, server: RunningServer) -> None:
    root, steps = weights_dir(server), [40, 41, 42, 43]
    for step in steps:
        publish(backend, root, step)
    assert server.config.output_dir is not None
    engine = PrimeEngine(server.root)

    async def main() -> None:
        client, canary = InferenceClient(f"{server.root}/v1"), CanaryCheck(1000)
        servers = ServerPool([client], [engine], PolicyVersion(), root, canary=canary)
        relay = WeightRelay(servers, is_received=lambda step: True, timeout_s=30, log_timeline=lambda *interval: None)
        relay.mark_sent(50)
        for step in steps:
            await relay.load(step)
        assert canary.num_checked == 3
        await engine.reload_weights()  # as a server that was started again
        await servers.recover(await servers.check_servers())
        assert (await read_health(client)).version == 43 and servers.num_recovered == 0
        plant_fault(server)
        servers.unreachable[0] = (anyio.current_time(), "it was away")
        try:
            await servers.recover(await servers.check_servers())
        finally:
            await client.close()

    with pytest.raises(CanaryMismatch, match=r"the engine is paused"):
        anyio.run(main)
    server.post("/resume", {})


def test_a_canary_of_another_schema_is_rejected(tmp_path: Path) -> None:
    assert read_canary(tmp_path) is None
    (tmp_path / CANARY_FILE).write_text(
        '{"schema": 9, "step": 1, "token_ids": [], "logprobs": [], "dtype": "", "exact": true}'
    )
    with pytest.raises(ValueError, match="schema 9"):
        read_canary(tmp_path)
    (tmp_path / CANARY_FILE).write_text("{")
    with pytest.raises(ValueError, match="no canary"):
        read_canary(tmp_path)


def test_the_trainers_dtype_is_published(backend: Backend) -> None:
    narrow = replace(backend, placement=replace(backend.placement, dtype=torch.bfloat16, attn="sdpa"))
    assert (narrow.compute_canary(1).dtype, narrow.compute_canary(1).exact) == ("bfloat16", False)
