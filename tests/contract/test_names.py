"""Every path, entry point, import, key, default and metric that documents 000, 001 and 003 name."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest

from prime_rl.utils.pydantic_config import parse_argv

ROOT = Path(__file__).parents[2]

PATHS = {
    "000:103": "experiments/context_distill/rl.toml",
    "000:115": "examples/reverse_text/",
    "000:116": "examples/alphabet_sort/",
    "000:117": "examples/wordle/",
    "000:118": "examples/wiki_search/",
    "000:129": "src/prime_rl/orchestrator/",
    "000:130": "src/prime_rl/rl.py",
    "000:153": "configs/debug/eval.toml",
    "001:145": "experiments/context_distill/rl.toml",
    "001:146": "experiments/context_distill/CLAUDE.md",
    "001:147": "experiments/context_distill/README.md",
    "001:151": "docs/on_policy_distillation.md",
    "001:152": "experiments/sokoban/README.md",
    "003:47": "configs/examples/reverse_text/sft/train.toml",
    "003:161": "src/prime_rl/trainer/rl/train.py",
    "003:162": "src/prime_rl/trainer/rl/loss.py",
    "003:163": "src/prime_rl/trainer/rl/data.py",
    "003:165": "src/prime_rl/trainer/sft/train.py",
    "003:166": "src/prime_rl/trainer/sft/data.py",
    "003:167": "src/prime_rl/trainer/config.py",
    "003:168": "src/prime_rl/trainer/model.py",
    "003:169": "src/prime_rl/trainer/ckpt.py",
    "003:170": "src/prime_rl/trainer/lora.py",
    "003:171": "src/prime_rl/trainer/optim.py",
    "003:172": "src/prime_rl/trainer/parallel_dims.py",
    "003:173": "src/prime_rl/trainer/models/",
    "003:176": "src/prime_rl/orchestrator/orchestrator.py",
    "003:177": "src/prime_rl/orchestrator/rollout_manager.py",
    "003:178": "src/prime_rl/orchestrator/weight_relay.py",
    "003:179": "src/prime_rl/orchestrator/config.py",
    "003:182": "src/prime_rl/inference/server.py",
    "003:183": "src/prime_rl/inference/config.py",
    "003:184": "src/prime_rl/inference/vllm/",
    "003:185": "src/prime_rl/inference/patches.py",
    "003:188": "src/prime_rl/eval/eval.py",
    "003:189": "src/prime_rl/eval/envs.py",
    "003:190": "src/prime_rl/eval/config.py",
    "003:193": "src/prime_rl/synthesize/synthesize.py",
    "003:194": "src/prime_rl/synthesize/config.py",
    "003:197": "src/prime_rl/utils/pydantic_config.py",
    "003:198": "src/prime_rl/utils/monitor.py",
    "003:199": "src/prime_rl/utils/logger.py",
    "003:200": "src/prime_rl/utils/vf.py",
    "003:201": "src/prime_rl/utils/client.py",
    "003:253": "docs/async.md",
    "003:297": "src/prime_rl/monitor/wandb_monitor.py",
}
ENTRY_POINTS = {
    "003:148": ("rl", "src/prime_rl/rl.py"),
    "003:149": ("trainer", "src/prime_rl/trainer/rl/train.py"),
    "003:150": ("orchestrator", "src/prime_rl/orchestrator/orchestrator.py"),
    "003:151": ("inference", "src/prime_rl/inference/server.py"),
    "003:152": ("sft", "src/prime_rl/trainer/sft/train.py"),
    "003:153": ("eval", "src/prime_rl/eval/eval.py"),
    "003:154": ("synthesize", "src/prime_rl/synthesize/synthesize.py"),
    "003:155": ("monitor", "src/prime_rl/monitor/wandb_monitor.py"),
}
IMPORTS = {
    "003:167": "prime_rl.trainer.config AdamConfig ModelConfig ParallelDims TrainConfig",
    "003:183": "prime_rl.inference.config SamplingConfig ModelConfig",
    "003:225": "prime_rl.trainer.parallel_dims ParallelDims",
    "003:266": "prime_rl.trainer.ckpt save_checkpoint",
    "003:267": "prime_rl.trainer.ckpt load_checkpoint",
}
EXTRAS = {"003:30": "fa", "003:35": "dev"}

DISTILL = ROOT / "experiments" / "context_distill" / "rl.toml"
TEACHER = ("--orchestrator.teacher-model.context", "Think.\n\n")
LORA = ("--trainer.model.lora.rank", "32", "--trainer.model.lora.alpha", "64")
VALUES: dict[str, tuple[tuple[str, ...], str, Any]] = {
    # where: (options of rl, key, what it must be)
    "000:45": (("--max-steps", "100"), "trainer.max_steps", 100),
    "000:46": ((), "seq_len", 2048),
    "000:47": ((), "max_async_level", 2),
    "000:48": ((), "output_dir", Path("outputs")),
    "000:51": ((), "model.name", "Qwen/Qwen3-0.6B"),
    "000:54": (("--trainer.optim.lr", "1e-5"), "trainer.optim.lr", 1e-5),
    "000:57": (LORA, "trainer.model.lora.rank", 32),
    "000:58": (LORA, "trainer.model.lora.alpha", 64),
    "000:61": (("--orchestrator.batch-size", "128"), "orchestrator.batch_size", 128),
    "000:62": (("--orchestrator.rollouts-per-example", "8"), "orchestrator.rollouts_per_example", 8),
    "000:65": (("--orchestrator.env.0.id", "reverse-text"), "orchestrator.env.0.id", "reverse-text"),
    "000:68": (("--wandb.project", "my-project"), "trainer.wandb.project", "my-project"),
    "000:167": ((), "trainer.loss.type", "aipo"),
    "000:177": (TEACHER, "trainer.loss.adv_tau", 0.5),
    "000:188": (
        (*LORA, "--trainer.model.lora.target-modules", '["q_proj", "v_proj"]'),
        "trainer.model.lora.target_modules",
        ["q_proj", "v_proj"],
    ),
    "001:22": (TEACHER, "trainer.loss.teacher_tau", 0.5),
    "001:23": (TEACHER, "trainer.loss.student_tau", 0.5),
    "001:25": (TEACHER, "orchestrator.teacher_model.eval_baseline", False),
    "001:52": (("--orchestrator.buffer.skip-verification",), "orchestrator.buffer.skip_verification", True),
    "001:132": (("@", str(DISTILL)), "trainer.model.lora.rank", 16),
    "003:272": (("--model.name", "Qwen/Qwen3-8B"), "trainer.model.name", "Qwen/Qwen3-8B"),
}
LOSSES = {
    "000:167": "aipo",
    "000:168": "grpo",
    "000:169": "gspo",
    "000:170": "opo",
    "000:171": "rloo",
    "003:11": "cispo",
}


@pytest.mark.parametrize("where", PATHS)
def test_a_documented_path_is_there(where: str) -> None:
    path = ROOT / PATHS[where]
    assert path.is_dir() if PATHS[where].endswith("/") else path.is_file()


@pytest.mark.parametrize("where", ENTRY_POINTS)
def test_documented_commands_are_defined_in_documented_files(where: str) -> None:
    name, path = ENTRY_POINTS[where]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"][name].partition(":")
    found = importlib.import_module(module)
    assert Path(found.__file__ or "").resolve() == (ROOT / path).resolve() and callable(getattr(found, function))


@pytest.mark.parametrize("where", IMPORTS)
def test_a_documented_name_can_be_imported(where: str) -> None:
    module, *names = IMPORTS[where].split()
    assert not [name for name in names if not hasattr(importlib.import_module(module), name)]


@pytest.mark.parametrize("where", EXTRAS)
def test_a_documented_extra_is_offered(where: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert EXTRAS[where] in project["optional-dependencies"]


def parse_rl(*argv: str) -> Any:
    from prime_rl.config import RLConfig

    return parse_argv(RLConfig, argv, "rl", {})[0]


@pytest.mark.parametrize("where", VALUES)
def test_a_documented_key_has_its_value(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    argv, key, expected = VALUES[where]
    value: Any = parse_rl(*argv)
    for part in key.split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    assert value == expected


@pytest.mark.parametrize("where", LOSSES)
def test_a_documented_loss_can_be_chosen(where: str) -> None:
    assert parse_rl("--trainer.loss.type", LOSSES[where]).trainer.loss.type == LOSSES[where]


@pytest.mark.parametrize("key", ["dp", "tp", "pp", "cp"])
def test_documented_parallelism_is_accepted(key: str) -> None:
    """003:226 to 229."""
    from prime_rl.trainer.config import TrainConfig

    config, _ = parse_argv(TrainConfig, [f"--parallel.{key}", "2"], "trainer", {})
    assert getattr(config.parallel, key) == 2


def test_accumulation_has_its_documented_names() -> None:
    """003:232: micro_bs per GPU, batch_size over all."""
    from prime_rl.trainer.config import SFTConfig

    config, _ = parse_argv(SFTConfig, ["--micro-bs", "2", "--data.batch-size", "8"], "sft", {})
    assert config.micro_bs == 2 and config.data.batch_size == 8  # type: ignore[union-attr]


def test_distillation_without_context_is_rejected() -> None:
    """001:24: the context is required."""
    with pytest.raises(ValueError, match="context"):
        parse_rl("--orchestrator.teacher-model.context-position", "system_append")


def test_baseline_without_evaluation_is_rejected() -> None:
    """001:118."""
    with pytest.raises(ValueError, match=r"\[orchestrator.eval\]"):
        parse_rl(*TEACHER, "--orchestrator.teacher-model.eval-baseline")
