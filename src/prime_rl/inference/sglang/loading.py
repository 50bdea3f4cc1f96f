"""Builds the gateway: detects the server's capabilities, probes its log-probs, and loads the initial weights."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import anyio
from loguru import logger

from prime_rl.inference.access import read_api_key
from prime_rl.inference.adapters import read_adapter
from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.detokenizer import Decode
from prime_rl.inference.engine import AdapterSpec
from prime_rl.inference.initial_weights import prepare_model_dir
from prime_rl.inference.request_parsing import Json
from prime_rl.inference.sglang.engine import LoadedWeights, SGLangGateway
from prime_rl.inference.sglang.protocol import read_top
from prime_rl.inference.weight_dirs import check_step
from prime_rl.transport.broadcast import Broadcast
from prime_rl.transport.canary import canary_tokens
from rollouts.training.json_files import read_json_file
from rollouts.training.weight_sync import EngineError, SGLangEngine

RETRY_S = 0.2
PROBE_TOP = 8
PROBE_TEMPERATURE = 0.5


@dataclass(frozen=True)
class PublishedDirs:
    """Weight source whose directories are verified here and loaded by the server."""

    base: Path

    def read_base(self) -> tuple[Path, int]:
        """The initial model, as version 0."""
        return self.base, 0

    def read_step(self, directory: Path) -> tuple[Path, int]:
        """A published directory and its version; `ValueError` if verification fails."""
        return directory, check_step(directory)[0]

    def read_adapter(self, directory: Path, version: int | None = None) -> tuple[Path, AdapterSpec]:
        """A verified LoRA adapter directory; see `read_adapter`."""
        return directory, read_adapter(directory, version)[1]

    def find_other_base(self, directory: Path, held: Path | None) -> None:
        """SGLang serves no adapter as its model."""

    def read_model(self, directory: Path) -> Path:
        """The directory, which the server loads."""
        return directory

    def receive_step(self, broadcast: Broadcast, step: int) -> NoReturn:
        """Not supported: SGLang loads directories."""
        raise ValueError("SGLang loads weights from directories: use /update_weights with weight_dir")


def build_gateway(config: InferenceConfig, model_dir: Path, decode: Decode) -> tuple[SGLangGateway, PublishedDirs]:
    """Build the gateway to `sglang.base_url` and load the initial weights there as version 0.

    `TimeoutError` if the server does not respond; `ValueError` if it is too old, returns log-probs without the
    temperature, or its context is too short.
    """
    assert config.sglang.base_url is not None
    server = SGLangEngine(config.sglang.base_url, config.sglang.timeout, headers=_read_headers(config))
    hf_config = read_json_file(model_dir / "config.json")
    if "vocab_size" not in hf_config:
        raise ValueError(f"{model_dir}/config.json has no vocab_size: SGLang cannot serve this model")
    info = anyio.run(_connect, server, config.sglang.timeout)
    base = prepare_model_dir(config)
    anyio.run(_load_base, server, info, base, base != model_dir)
    anyio.run(_probe, server, int(hf_config["vocab_size"]))
    if not info.get("enable_deterministic_inference"):
        logger.warning("Seeds are ignored: start SGLang with --enable-deterministic-inference")
    model_max_len = int(info.get("context_length") or hf_config["max_position_embeddings"])
    max_len = config.model.max_model_len
    if max_len is not None and max_len > model_max_len:
        raise ValueError(f"model.max_model_len is {max_len}, but the SGLang server has a context of {model_max_len}")
    gateway = SGLangGateway(
        server,
        base=LoadedWeights(base, 0),
        decode=decode,
        vocab_size=int(hf_config["vocab_size"]),
        max_model_len=min(max_len or model_max_len, model_max_len - 1),  # SGLang rejects requests that fill its context
        max_running=config.max_batch_size,
        dtype=_find_dtype(str(info.get("dtype", "auto")), hf_config),
        supports_seeds=bool(info.get("enable_deterministic_inference")),
    )
    logger.warning("The SGLang backend is experimental: it was tested against a fake server only")
    logger.info(f"SGLang {info.get('version', '')} at {server}, {gateway.dtype}, context {model_max_len}")
    return gateway, PublishedDirs(base)


def _read_headers(config: InferenceConfig) -> dict[str, str]:
    key = read_api_key("sglang.api_key_var", config.sglang.api_key_var)
    return {} if key is None else {"authorization": f"Bearer {key}"}


async def _connect(server: SGLangEngine, timeout_s: float) -> Json:
    """Wait for the server; returns its options and `weight_version`."""
    end, logged = time.monotonic() + timeout_s, False
    while True:
        try:
            version = await server.read_version()
            info = await server.request("GET", "/server_info") or await server.request("GET", "/get_server_info") or {}
            break
        except EngineError as error:
            if not error.is_transient:
                raise ValueError(f"sglang.base_url = {server} is not an SGLang server: {error}") from error
            if time.monotonic() > end:
                raise TimeoutError(
                    f"sglang.base_url: no response from {server} ({error}): start SGLang first"
                ) from error
            if not logged:
                logger.info(f"Waiting for SGLang at {server}")
            logged = True
        await anyio.sleep(RETRY_S)
    if version is None:
        raise ValueError(f"{server} reports no weight_version: SGLang 0.5.2 or newer is required")
    return {**info, "weight_version": version}


async def _load_base(server: SGLangEngine, info: Json, base: Path, is_rewritten: bool) -> None:
    """Load `base` as version 0 unless it is already loaded; an earlier run may have left other weights."""
    untouched = info["weight_version"] in ("default", "0") and _is_same_dir(info.get("model_path"), base)
    try:
        if not untouched or is_rewritten:
            await server.update_weights_from_checkpoint(str(base), version="0")
        elif info["weight_version"] != "0":
            # A restarted server reports "default" and can then be detected.
            await server.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})
    except EngineError as error:
        raise ValueError(
            f"SGLang at {server} failed to load {base}: {error} (can it access this directory?)"
        ) from error


def _is_same_dir(path: Any, directory: Path) -> bool:
    return isinstance(path, str) and Path(path).resolve() == directory.resolve()


async def _probe(server: SGLangEngine, vocab_size: int) -> None:
    """`ValueError` if log-probs are without the temperature (SGLANG_RETURN_ORIGINAL_LOGPROB).

    At temperature T the difference between two log-probs is 1 / T of that at temperature 1.
    """

    async def measure_gap(temperature: float) -> float:
        body = {
            "input_ids": canary_tokens(vocab_size)[:PROBE_TOP],
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature},
            "return_logprob": True,
            "top_logprobs_num": PROBE_TOP,
        }
        meta = (await server.load("/generate", body)).get("meta_info")
        if not isinstance(meta, dict) or not meta.get("output_top_logprobs"):
            raise ValueError(f"{server} returns no log-probs: is it an SGLang server for text generation?")
        top = read_top(meta["output_top_logprobs"][0])
        return top[0][1] - top[-1][1]

    try:
        gap, scaled_gap = await measure_gap(0.0), await measure_gap(PROBE_TEMPERATURE)
    except EngineError as error:
        raise ValueError(f"SGLang at {server} failed to generate: {error}") from error
    if abs(scaled_gap - gap / PROBE_TEMPERATURE) > abs(scaled_gap - gap):
        raise ValueError(
            f"SGLang at {server} returns log-probs without the sampling temperature: start it without "
            "SGLANG_RETURN_ORIGINAL_LOGPROB"
        )


def _find_dtype(name: str, hf_config: Json) -> str:
    """Compute dtype of the server; auto: the model's dtype, but float16 for float32 models."""
    if name == "auto":
        found = str(hf_config.get("torch_dtype") or hf_config.get("dtype") or "bfloat16").removeprefix("torch.")
        return "float16" if found == "float32" else found
    return {"half": "float16", "float": "float32"}.get(name, name)
