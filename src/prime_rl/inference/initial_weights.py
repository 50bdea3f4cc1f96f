"""Initial weights of engines that load model directories."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from pathlib import Path

from prime_rl.inference.config import InferenceConfig
from prime_rl.runtime.run_dir import RunDir
from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.transport.weights import is_adapter, publish_weights
from rollouts.training.steps import step_path


def prepare_model_dir(config: InferenceConfig) -> Path:
    """Directory from which vLLM or SGLang loads; random or truncated debug weights are written to disk first.

    `ValueError` for a LoRA adapter, which they do not load as a model.
    """
    model_dir = resolve_model_dir(config.model.name, config.model.trust_remote_code)
    debug = config.model.debug
    if not debug.random_init and debug.num_layers is None:
        if is_adapter(model_dir):
            raise ValueError(
                f"model.name {config.model.name!r} is a LoRA adapter, which only the embedded engine merges: set "
                f'backend = "embedded", or merge it (convert {shlex.quote(str(model_dir))} DIR) and serve that'
            )
        return model_dir
    from prime_rl.inference.embedded.loading import WeightReader  # imports torch

    tensors, version = WeightReader(config, model_dir).read_base()
    out = config.output_dir
    root = Path(tempfile.mkdtemp(prefix="prime-rl-")) if out is None else RunDir(out).initial
    shutil.rmtree(step_path(root, version), ignore_errors=True)
    return publish_weights(root, version, tensors, model_dir, num_layers=debug.num_layers).resolve()
