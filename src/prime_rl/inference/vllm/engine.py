"""Starting vLLM's own server from our config, with our routes and our weight loading added by its hooks."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.directories import prepare_model_dir
from prime_rl.utils.process import find_gpus

CONFIG_VARIABLE = "PRIME_RL_INFERENCE_CONFIG"
"""How the config reaches our part of vLLM's processes: as JSON."""
MODEL_DIR_VARIABLE = "PRIME_RL_INFERENCE_MODEL_DIR"
MIDDLEWARE = "prime_rl.inference.vllm.routes.PrimeRoutes"
WORKER = "prime_rl.inference.vllm.worker.WeightWorker"
MAX_LOGPROBS = 100
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""What a trainer adapts. Never the output layer: with room for adapters there, vLLM 0.32 dies of `prompt_logprobs` as
soon as two requests run (its rows are prompt tokens, their adapters those of requests)."""
TOOL_PARSERS = {"hermes": "hermes", "llama": "llama3_json"}
REASONING_PARSERS = {"think": "qwen3"}


def serve_vllm(config: InferenceConfig) -> int:
    """Become vLLM's server: the process is replaced, so that signals and the exit code are vLLM's own."""
    from loguru import logger

    from prime_rl.utils.logger import setup_logger

    setup_logger(config.name, config.log, None)
    model_dir = prepare_model_dir(config)
    argv, environ = build_argv(config, model_dir), build_environment(config, model_dir)
    logger.info(f"starting vLLM: {' '.join(argv[2:])}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(argv[0], argv, environ)


def build_argv(config: InferenceConfig, model_dir: Path, *, on_gpu: bool | None = None) -> list[str]:
    """The command line of vLLM's server. What `inference.vllm` says comes last and so wins."""
    on_gpu = bool(find_gpus()) if on_gpu is None else on_gpu
    model, parallel, chunk = config.model, config.parallel, config.max_prefill_tokens
    options: dict[str, Any] = {
        "model": str(model_dir),
        "served_model_name": [model.name, str(model_dir)],
        "host": config.server.host,
        "port": config.server.port,
        "dtype": ("bfloat16" if on_gpu else "float32") if model.dtype == "auto" else model.dtype,
        "max_model_len": model.max_model_len,
        "max_num_seqs": config.max_batch_size,
        "max_num_batched_tokens": chunk if chunk != InferenceConfig().max_prefill_tokens else None,
        "tensor_parallel_size": parallel.tp,
        "data_parallel_size": parallel.dp if parallel.dp > 1 else None,
        "seed": config.seed,
        "trust_remote_code": model.trust_remote_code or None,
        "generation_config": "vllm",
        "override_generation_config": sampling_defaults(config) or None,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_LOGPROBS,
        "enable_auto_tool_choice": True,
        "tool_call_parser": TOOL_PARSERS[model.tool_call_parser],
        "reasoning_parser": REASONING_PARSERS[model.reasoning_parser] if model.reasoning_parser else None,
        "enforce_eager": True if config.enforce_eager or not on_gpu else None,
        "disable_uvicorn_access_log": True,
        "enable_scale_out": True if has_option("enable_scale_out") else None,  # /inference/v1/generate
        "enable_lora": True if config.max_lora_rank is not None else None,
        "max_lora_rank": find_lora_rank(config.max_lora_rank),
        "lora_target_modules": LORA_TARGETS if config.max_lora_rank is not None else None,
        "middleware": MIDDLEWARE,
        "worker_extension_cls": WORKER,
    }
    options |= {name.replace("-", "_"): value for name, value in config.vllm.items()}
    # One process answers, whatever dp is: it keeps the version. (`vllm serve` would start one for each copy.)
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return argv + [word for name, value in options.items() for word in write_option(name, value)]


def find_lora_rank(wanted: int | None) -> int | None:
    """The smallest rank that vLLM makes room for and that is enough; `ValueError` beyond the largest."""
    if wanted is None:
        return None
    if wanted > LORA_RANKS[-1]:
        raise ValueError(f"max_lora_rank = {wanted}: vLLM takes adapters of rank {LORA_RANKS[-1]} at most")
    return min(rank for rank in LORA_RANKS if rank >= wanted)


def has_option(name: str) -> bool:
    """Whether the vLLM that is installed knows an option of the server (asking its parser would take seconds)."""
    found = importlib.util.find_spec("vllm")
    roots = [] if found is None else list(found.submodule_search_locations or [])
    files = [path for root in roots for path in Path(root, "entrypoints").rglob("cli_args.py")]
    return any(name in path.read_text(encoding="utf-8") for path in files)


def write_option(name: str, value: Any) -> list[str]:
    """An option as words of a command line: switches by name, tables as JSON, None not at all."""
    flag = "--" + name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    if isinstance(value, dict):
        return [flag, json.dumps(value)]
    return [flag, *map(str, value)] if isinstance(value, list) else [flag, str(value)]


def sampling_defaults(config: InferenceConfig) -> dict[str, Any]:
    """`inference.sampling` in the words of a generation config; `ValueError` for what has no word there."""
    given = config.sampling.model_dump(exclude_defaults=True)
    names = {"max_tokens": "max_new_tokens"}
    known = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
    if unknown := sorted(given.keys() - set(known)):
        raise ValueError(
            f"sampling.{unknown[0]} cannot be a default of vLLM's server: send it with requests, or leave it out"
        )
    return {names.get(name, name): value for name, value in given.items()}


def build_environment(config: InferenceConfig, model_dir: Path) -> dict[str, str]:
    """The environment of vLLM's processes."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; read on the CPU only
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO" if config.log.level in ("debug", "trace") else "WARNING",
        **os.environ,
        CONFIG_VARIABLE: config.model_dump_json(),
        MODEL_DIR_VARIABLE: str(model_dir),
    }
