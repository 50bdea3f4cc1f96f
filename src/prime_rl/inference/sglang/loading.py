"""Building the gateway: what kind of server is there, whether its log-probs can be used, the weights of the start."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import anyio
from loguru import logger

from prime_rl.inference.adapters import read_adapter
from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.directories import check_step, prepare_model_dir
from prime_rl.inference.engine import AdapterSpec
from prime_rl.inference.requests import Json
from prime_rl.inference.sglang.engine import Held, SGLangGateway
from prime_rl.inference.sglang.wire import read_top
from prime_rl.inference.text import Decode
from prime_rl.transport.broadcast import Broadcast
from prime_rl.transport.canary import canary_tokens
from rollouts.training.weight_sync import EngineError, SGLangEngine

RETRY_S = 0.2
PROBE_TOP = 8
PROBE_TEMPERATURE = 0.5


@dataclass(frozen=True)
class PublishedDirs:
    """Weights as directories, checked here and loaded over there."""

    base: Path

    def read_base(self) -> tuple[Path, int]:
        """The model of the start, as version 0."""
        return self.base, 0

    def read_step(self, directory: Path) -> tuple[Path, int]:
        """A published directory and its version; `ValueError` when it cannot be trusted."""
        return directory, check_step(directory)[0]

    def read_adapter(self, directory: Path, version: int | None = None) -> tuple[Path, AdapterSpec]:
        """The directory of a LoRA adapter, read and checked; see `read_adapter`."""
        return directory, read_adapter(directory, version)[1]

    def receive_step(self, broadcast: Broadcast, step: int) -> NoReturn:
        """Not offered: SGLang is told directories."""
        raise ValueError("SGLang loads weights from directories: use /update_weights with one")


def build_gateway(config: InferenceConfig, model_dir: Path, decode: Decode) -> tuple[SGLangGateway, PublishedDirs]:
    """The gateway to the server of `sglang.base_url`, which then holds the weights of the start as version 0.

    `ValueError` when it does not answer in time, is too old, tells other log-probs, or has less room than is asked for.
    """
    assert config.sglang.base_url is not None
    server = SGLangEngine(config.sglang.base_url, config.sglang.timeout, headers=_read_headers(config))
    hf_config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    if "vocab_size" not in hf_config:
        raise ValueError(f"{model_dir}/config.json names no vocab_size: SGLang cannot serve this model")
    facts = anyio.run(_connect, server, config.sglang.timeout)
    base = prepare_model_dir(config)
    anyio.run(_bring_to_base, server, facts, base, base != model_dir)
    meta = anyio.run(_probe, server, int(hf_config["vocab_size"]))
    if not facts.get("enable_deterministic_inference"):
        logger.warning(
            "SGLang draws by seed only when started with --enable-deterministic-inference: seeds are not kept"
        )
    tells_spans = "weight_versions" in meta
    if not tells_spans:
        logger.warning(
            "this SGLang does not tell which weights drew which token: running requests end before an update"
        )
    longest = int(facts.get("context_length") or hf_config["max_position_embeddings"])
    wanted = config.model.max_model_len
    if wanted is not None and wanted > longest:
        raise ValueError(f"model.max_model_len is {wanted}, but the SGLang server has a context of {longest}")
    gateway = SGLangGateway(
        server,
        base=Held(base, 0),
        decode=decode,
        vocab_size=int(hf_config["vocab_size"]),
        max_model_len=min(wanted or longest, longest - 1),  # it refuses what fills its context
        max_running=config.max_batch_size,
        dtype=_find_dtype(str(facts.get("dtype", "auto")), hf_config),
        tells_spans=tells_spans,
        keeps_seeds=bool(facts.get("enable_deterministic_inference")),
    )
    logger.info(f"SGLang {facts.get('version', '')} at {server}, {gateway.dtype}, context {longest}")
    return gateway, PublishedDirs(base)


def _read_headers(config: InferenceConfig) -> dict[str, str]:
    variable = config.sglang.api_key_var
    if variable is None:
        return {}
    key = os.environ.get(variable)
    if not key:
        raise ValueError(f"sglang.api_key_var names {variable}, which is not set: export it or leave the key out")
    return {"authorization": f"Bearer {key}"}


async def _connect(server: SGLangEngine, timeout_s: float) -> Json:
    """What the server says of itself, once it answers: its options, and `weight_version` beside them."""
    end, told = time.monotonic() + timeout_s, False
    while True:
        try:
            version = await server.read_version()
            facts = await server.ask("GET", "/server_info") or await server.ask("GET", "/get_server_info") or {}
            break
        except EngineError as error:
            if error.kind != "unreachable" and "answered 503" not in error.message:
                raise ValueError(f"sglang.base_url = {server} answers, but not as SGLang does: {error}") from error
            if time.monotonic() > end:
                raise ValueError(
                    f"sglang.base_url: nothing answers at {server} ({error}): start SGLang first"
                ) from error
            if not told:
                logger.info(f"waiting for SGLang at {server}")
            told = True
        await anyio.sleep(RETRY_S)
    if version is None:
        raise ValueError(f"{server} tells no weight_version: SGLang 0.5.2 or newer is needed")
    return {**facts, "weight_version": version}


async def _bring_to_base(server: SGLangEngine, facts: Json, base: Path, written_anew: bool) -> None:
    """Version 0 is what is in `base`: an earlier run may have left its weights in this server."""
    untouched = facts["weight_version"] in ("default", "0") and _same(facts.get("model_path"), base)
    try:
        if not untouched or written_anew:
            await server.update_weights_from_checkpoint(str(base), version="0")
        elif facts["weight_version"] != "0":
            # So that a server that is started again, and says "default", is known by it.
            await server.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})
    except EngineError as error:
        raise ValueError(f"SGLang at {server} does not load {base}: {error} (can it see this directory?)") from error


def _same(path: Any, directory: Path) -> bool:
    return isinstance(path, str) and Path(path).resolve() == directory.resolve()


async def _probe(server: SGLangEngine, vocab_size: int) -> Json:
    """The `meta_info` of an answer, after a look at what its log-probs are of.

    At temperature T the gap between two log-probs is 1 / T of that at temperature 1, unless the server was told to
    leave the temperature out (SGLANG_RETURN_ORIGINAL_LOGPROB): `ValueError`.
    """

    async def ask(temperature: float) -> Json:
        body = {
            "input_ids": canary_tokens(vocab_size)[:PROBE_TOP],
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature},
            "return_logprob": True,
            "top_logprobs_num": PROBE_TOP,
        }
        meta = (await server.load("/generate", body)).get("meta_info")
        if not isinstance(meta, dict) or not meta.get("output_top_logprobs"):
            raise ValueError(f"{server} tells no log-probs: is it an SGLang server for text generation?")
        return meta

    try:
        cold, hot = await ask(0.0), await ask(PROBE_TEMPERATURE)
    except EngineError as error:
        raise ValueError(f"SGLang at {server} does not generate: {error}") from error
    plain, scaled = (read_top(meta["output_top_logprobs"][0]) for meta in (cold, hot))
    gap, scaled_gap = plain[0][1] - plain[-1][1], scaled[0][1] - scaled[-1][1]
    if abs(scaled_gap - gap / PROBE_TEMPERATURE) > abs(scaled_gap - gap):
        raise ValueError(
            f"SGLang at {server} tells log-probs without the temperature that it samples at: start it without "
            "SGLANG_RETURN_ORIGINAL_LOGPROB"
        )
    return cold


def _find_dtype(name: str, hf_config: Json) -> str:
    """The number format it computes in; auto: that of the model, but half precision for one in float32."""
    if name == "auto":
        found = str(hf_config.get("torch_dtype") or hf_config.get("dtype") or "bfloat16").removeprefix("torch.")
        return "float16" if found == "float32" else found
    return {"half": "float16", "float": "float32"}.get(name, name)
