"""The output directory of `rl`: leftovers of earlier runs, resumption, configuration files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.configuration.command import record_config
from prime_rl.runtime.run_dir import CKPT_PARTS, RunDir, find_used
from rollouts.training.steps import prune_steps, remove_unfinished, step_path

if TYPE_CHECKING:
    from prime_rl.config import RLConfig
    from prime_rl.eval.config import EvalConfig
    from prime_rl.utils.pydantic_config import BaseConfig

OR_CLEAN = ", or remove its steps with --clean"
SINGLE_USE = ("clean", "open")
"""Options of `rl` for one start, beside those of its trainer (`TrainerConfig.find_single_use`)."""
SERVED = ("max_model_len", "tool_call_parser", "reasoning_parser")
"""Keys of the server's model that change completions or how they are read."""


def prepare_output_dir(config: RLConfig) -> None:
    """Separate the run from files of an earlier one, remove incomplete steps, and set up --resume or --clean."""
    run, resume_step = RunDir(config.output_dir), None if config.ckpt is None else config.ckpt.resume_step
    if config.clean and resume_step is not None:
        key = "resume" if config.resume else "ckpt.resume_step"
        raise ValueError(f"clean would remove the steps that {key} needs: leave one of them out")
    if resume_step is None:
        prepare_new_run(config, run)
    else:
        if resume_step == -1:
            run.quarantine_corrupt_checkpoints(CKPT_PARTS)
        prepare_resume(run, resume_step)
    for root in run.step_dirs:
        remove_unfinished(root)


def prepare_new_run(config: RLConfig, run: RunDir) -> None:
    """Archive the records of an earlier run, and remove its steps with --clean; `ValueError` for steps without it."""
    used = find_used(run.step_dirs)
    if used and not config.clean:
        raise ValueError(run.describe_used(CKPT_PARTS, options=OR_CLEAN))
    for root in used:
        check_model_not_removed(config, root)
    run.archive(run.records)
    for root, steps in used.items():
        remove_steps(root, steps)


def prepare_resume(run: RunDir, requested: int) -> None:
    """Move steps that the interrupted attempt wrote after the checkpoint, before a process can read them as new.

    Later checkpoints than a named one stay until trainer and orchestrator, which may refuse it, have loaded it.
    """
    is_named = requested != -1
    step = run.find_resume_step(requested, CKPT_PARTS, verify=CKPT_PARTS if is_named else (), options=OR_CLEAN)
    if not is_named:
        where = "no checkpoint yet, starting from the beginning" if step is None else f"resuming from step {step}"
        sys.stdout.write(f"note: ckpt.resume_step = -1 in {run.root}: {where}\n")
    prune_steps(run.broadcasts, lambda step: False)  # their sender has exited
    moved = (*run.step_dirs, run.evals)
    last = {root: step or 0 for root in moved if not (is_named and root == run.checkpoints)}
    if (folder := run.archive_steps(last)) is not None:
        sys.stdout.write(f"note: steps after {step or 0} of the interrupted attempt moved to {folder}\n")


def check_model_not_removed(config: RLConfig, removed: Path) -> None:
    """`ValueError` if --clean would remove the initial weights of the run, or those of its teacher."""
    names: dict[str, str | None] = {"model.name": config.model.name}
    if config.teacher_inference is not None:
        names["teacher_inference.model.name"] = config.teacher_inference.model.name
    if config.orchestrator.teacher_model is not None:
        names["orchestrator.teacher_model.model.name"] = config.orchestrator.teacher_model.model.name
    for key, name in names.items():
        if name is not None and Path(name).expanduser().resolve().is_relative_to(removed.resolve()):
            raise ValueError(f"{key} {name} is in {removed}, which --clean would empty: choose another --output-dir")


def remove_steps(root: Path, steps: Sequence[int]) -> None:
    """Remove `step_N` directories; the marker goes first, so that readers never see a partial step."""
    import shutil

    for step in steps:
        (step_path(root, step) / "STABLE").unlink(missing_ok=True)
        shutil.rmtree(step_path(root, step))


def write_configs(config: RLConfig) -> dict[str, Path]:
    """Write the config of each process, of the whole run and of a matching evaluation as TOML below `configs/`."""
    from prime_rl.utils.pydantic_config import write_config

    parts: dict[str, BaseConfig] = {
        "orchestrator": config.orchestrator,
        "trainer": config.trainer,
        "eval": build_eval_config(config),
    }
    if config.inference is not None:
        parts["inference"] = config.inference
    if config.teacher_inference is not None:
        parts["teacher_inference"] = config.teacher_inference
    run = RunDir(config.output_dir)
    paths = {name: run.config(name) for name in ("rl", *parts)}
    record_config(build_record(config), run, "rl")
    for name, part in parts.items():
        write_config(part, paths[name])
    return paths


def build_record(config: RLConfig) -> RLConfig:
    """The config of later starts: options of this one are off."""
    return config.for_later_starts(find_single_use(config))


def find_single_use(config: RLConfig) -> dict[str, Any]:
    """Keys of one start, with values for later ones."""
    later: dict[str, Any] = {name: False for name in SINGLE_USE if getattr(config, name)}
    single_use = config.trainer.find_single_use()
    later |= {f"trainer.{key}": value for key, value in single_use.items()}
    if "ckpt.resume_step" in single_use:
        later |= {f"{name}ckpt.resume_step": -1 for name in ("", "orchestrator.")}
    return later


def build_eval_config(config: RLConfig) -> EvalConfig:
    """An evaluation config with the environments and the sampling parameters of the run.

    What the run's server adds to requests and reads from completions is included: that of an evaluation has defaults.

    Published adapters are loaded with the base model of the run, which may be random.
    """
    from prime_rl.eval.config import EvalConfig

    trained, sampling = config.trainer.model, config.orchestrator.sampling
    model: dict[str, Any] = {"name": config.model.name}
    if trained.publishes_adapters:
        model["debug"] = trained.debug.model_dump()
    if config.inference is not None:
        served = config.inference.sampling
        model |= {name: getattr(config.inference.model, name) for name in SERVED}
        changed = {"max_tokens": sampling.max_tokens or served.max_tokens, "stop": sampling.stop or served.stop}
        sampling = sampling.model_copy(update={**changed, "extra_body": served.extra_body | sampling.extra_body})
    return EvalConfig.model_validate(
        {
            "model": model,
            "env": [env.plain() for env in config.orchestrator.env],
            "sampling": sampling.model_dump(),
            "output_dir": config.output_dir,
        }
    )
