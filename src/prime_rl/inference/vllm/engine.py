"""Launches a vLLM server from the inference config, with additional routes and weight loading through its hooks."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from prime_rl.inference.access import read_server_key
from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.initial_weights import prepare_model_dir
from prime_rl.runtime.machine import SHARED_GPU_VARIABLE, find_gpus

CONFIG_VARIABLE = "PRIME_RL_INFERENCE_CONFIG"
"""Passes the config, as JSON, to the plugins in vLLM's processes."""
MODEL_DIR_VARIABLE = "PRIME_RL_INFERENCE_MODEL_DIR"
MIDDLEWARE = "prime_rl.inference.vllm.routes.PrimeRoutes"
WORKER = "prime_rl.inference.vllm.worker.WeightWorker"
MAX_LOGPROBS = 100
SHARED_UTILIZATION = 0.4
"""Share of the memory of a GPU that another process of the run uses as well, of which vLLM would take .9."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Modules that a trainer adapts. Not the output layer: with LoRA enabled there, vLLM 0.32 crashes on `prompt_logprobs`
with two concurrent requests (its rows are prompt tokens, but the adapter indices are per request)."""
MAX_CPU_LORAS = 16
"""Adapters that vLLM keeps in memory. By default only those of one batch: each switch would read one from its files."""
TOOL_PARSERS = {"hermes": "hermes", "llama": "llama3_json"}
REASONING_PARSERS = {"think": "qwen3"}


def serve_vllm(config: InferenceConfig) -> int:
    """Replace this process by vLLM's server, so that signals and the exit code are handled by vLLM."""
    from loguru import logger

    from prime_rl.utils.logger import setup_logger

    setup_logger(config.name, config.log, None)
    read_server_key(config.server)  # before vLLM loads the model; its server reads the key again
    model_dir = prepare_model_dir(config)
    argv, environ = build_argv(config, model_dir), build_environment(config, model_dir)
    logger.info(f"Starting vLLM: {' '.join(argv[2:])}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(argv[0], argv, environ)


def build_argv(config: InferenceConfig, model_dir: Path, *, on_gpu: bool | None = None) -> list[str]:
    """Build the command line of vLLM's server. Options in `inference.vllm` take precedence."""
    on_gpu = bool(find_gpus()) if on_gpu is None else on_gpu
    model, parallel, chunk = config.model, config.parallel, config.max_num_batched_tokens
    given = {name.replace("-", "_"): value for name, value in config.vllm.items()}
    options: dict[str, Any] = {
        "model": str(model_dir),
        "served_model_name": list(dict.fromkeys((config.served_name, model.name, str(model_dir)))),
        "host": config.server.host,
        "port": config.server.port,
        "dtype": ("bfloat16" if on_gpu else "float32") if model.dtype == "auto" else model.dtype,
        "max_model_len": model.max_model_len,
        "max_num_seqs": config.max_batch_size,
        "max_num_batched_tokens": chunk,
        "tensor_parallel_size": parallel.tp,
        "data_parallel_size": parallel.dp if parallel.dp > 1 else None,
        "gpu_memory_utilization": SHARED_UTILIZATION if SHARED_GPU_VARIABLE in os.environ else None,
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
        "max_cpu_loras": None if config.max_lora_rank is None else max(MAX_CPU_LORAS, int(given.get("max_loras") or 1)),
        "lora_target_modules": LORA_TARGETS if config.max_lora_rank is not None else None,
        "middleware": MIDDLEWARE,
        "worker_extension_cls": WORKER,
    }
    options |= given
    # A single API server process for any dp, since it tracks the version (`vllm serve` would start one per replica).
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return argv + [word for name, value in options.items() for word in write_option(name, value)]


def find_lora_rank(max_rank: int | None) -> int | None:
    """Round up to a rank that vLLM supports; `ValueError` above the largest."""
    if max_rank is None:
        return None
    if max_rank > LORA_RANKS[-1]:
        raise ValueError(f"max_lora_rank = {max_rank}: vLLM supports rank {LORA_RANKS[-1]} at most")
    return min(rank for rank in LORA_RANKS if rank >= max_rank)


def has_option(name: str) -> bool:
    """Whether the installed vLLM server has an option (searches its source; importing the parser takes seconds)."""
    spec = importlib.util.find_spec("vllm")
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [path for root in roots for path in Path(root, "entrypoints").rglob("cli_args.py")]
    return any(name in path.read_text(encoding="utf-8") for path in files)


def write_option(name: str, value: Any) -> list[str]:
    """Format an option as command-line arguments: booleans as flags, dicts as JSON; None is omitted."""
    flag = "--" + name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    if isinstance(value, dict):
        return [flag, json.dumps(value)]
    return [flag, *map(str, value)] if isinstance(value, list) else [flag, str(value)]


def sampling_defaults(config: InferenceConfig) -> dict[str, Any]:
    """Convert `inference.sampling` to a generation config; `ValueError` for unsupported parameters."""
    given = config.sampling.model_dump(exclude_defaults=True)
    names = {"max_tokens": "max_new_tokens"}
    known = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
    if unknown := sorted(given.keys() - set(known)):
        raise ValueError(
            f"sampling.{unknown[0]} cannot be a default of vLLM's server: set it per request, or leave it out"
        )
    return {names.get(name, name): value for name, value in given.items()}


def build_environment(config: InferenceConfig, model_dir: Path) -> dict[str, str]:
    """Build the environment of vLLM's processes."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; CPU only
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO" if config.log.level in ("debug", "trace") else "WARNING",
        **os.environ,
        CONFIG_VARIABLE: config.model_dump_json(),
        MODEL_DIR_VARIABLE: str(model_dir),
    }
