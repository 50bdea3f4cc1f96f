"""`monitor RUN --replay STEP`: repeat a recorded optimizer step with the same command and compare."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prime_rl.monitor.compare import find_changed
from prime_rl.monitor.local_runs import LocalRun, open_run
from prime_rl.monitor.page_data import read_rows
from prime_rl.monitor.series import read_series
from prime_rl.runtime.process import ChildFailed, Supervisor
from prime_rl.runtime.run_dir import CKPT_PARTS, RunDir
from prime_rl.transport.batches import BATCH_FILE
from rollouts.training.steps import complete_steps, is_complete, step_path

COMPARED = ("loss/mean", "optim/grad_norm", "entropy/mean")
MODULES = {"trainer": "prime_rl.trainer.rl.train", "sft": "prime_rl.trainer.sft.train"}
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Replay:
    """Inputs of a replay: trainer, step, the checkpoint before it, and the batches in between.

    `sft` takes its batches from the data set again, at the place that the checkpoint remembers.
    """

    process: str
    step: int
    start: int
    batches: tuple[Path, ...]


@dataclass(frozen=True)
class Verdict:
    """Differing tensors by name, number of tensors, and differing (metric, recorded, replayed)."""

    num_tensors: int
    tensors: list[str]
    metrics: list[tuple[str, float, float]]

    @property
    def equal(self) -> bool:
        """Whether the replay is identical to the recorded step."""
        return not self.tensors and not self.metrics


def plan_replay(run: LocalRun, step: int) -> Replay:
    """The shortest replay; `ValueError` naming missing files and the key that keeps them."""
    process = next((name for name in MODULES if name in run.configs()), None)
    if process is None:
        raise ValueError(
            f"{run.name} has neither configs/trainer.toml nor configs/sft.toml, so there is no trainer to run"
        )
    versions = complete_steps(run.files.weights)
    if step not in versions or step < 1:
        raise ValueError(
            f"weights of step {step} are not in {run.name}/weights, so there is nothing to compare with; there are "
            f"{', '.join(map(str, (v for v in versions if v))) or 'none'}"
        )
    data = run.tables()[process].get("data", {})
    has_own_data = process == "sft" or isinstance(data.get("fake"), dict)  # else the text is "None"
    starts = [0, *complete_steps(run.files.checkpoints, CKPT_PARTS[:1] if has_own_data else CKPT_PARTS)]
    start = max(found for found in starts if found < step)
    batches = () if has_own_data else tuple(step_path(run.files.rollouts, n) for n in range(start + 1, step + 1))
    missing = next((path for path in batches if not is_complete(path)), None)
    if missing is not None:
        raise ValueError(
            f"{missing.name} of {run.name}/rollouts was removed when it was trained on: "
            "start runs that are to be replayed with --orchestrator.keep-rollouts and --ckpt.interval"
        )
    return Replay(process, step, start, batches)


def replay(run: LocalRun, step: int, log: Callable[[str], None]) -> Verdict:
    """Repeat the step in a separate directory; the run itself is only read."""
    plan = plan_replay(run, step)
    start = f"checkpoint {plan.start}" if plan.start else "the first weights"
    num_steps = "1 step" if step == plan.start + 1 else f"{step - plan.start} steps"
    log(f"replaying step {step} of {run.name} from {start}: {num_steps}")
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        place = RunDir(Path(folder))
        for batch in plan.batches:
            (place.rollouts / batch.name).mkdir(parents=True)
            for name in (BATCH_FILE, "STABLE"):
                shutil.copy(batch / name, place.rollouts / batch.name / name)
        if plan.start:
            # No link to the folder: the replay prunes files that the recorded run must keep.
            source = step_path(run.files.checkpoints, plan.start)
            shutil.copytree(source, place.checkpoints / source.name, copy_function=_link)
        _train(run, plan, place)
        return compare(run, open_run(place.root), step, plan.process)


def compare(run: LocalRun, again: LocalRun, step: int, process: str = "trainer") -> Verdict:
    """The recorded and the repeated version of a step."""
    names, number = find_changed(run.files.weights, again.files.weights, step)
    before, after = (read_series(part.rows()).get(process, {}) for part in (run, again))
    pairs = [(name, dict(before.get(name, ())).get(step), dict(after.get(name, ())).get(step)) for name in COMPARED]
    metrics = [(name, old, new) for name, old, new in pairs if old is not None and new is not None and old != new]
    return Verdict(number, names, metrics)


def verdict_text(step: int, verdict: Verdict) -> str:
    """The verdict as text."""
    if verdict.equal:
        return f"step {step} is reproduced: all {verdict.num_tensors} tensors have the recorded digests"
    lines = [f"step {step} is not reproduced: {len(verdict.tensors)} of {verdict.num_tensors} tensors"]
    lines += [f"  {name}" for name in verdict.tensors[:5]]
    lines += [f"  {name} was {old!r}, is {new!r}" for name, old, new in verdict.metrics]
    lines.append("  the same result needs the same device, library versions and number of threads and ranks")
    return "\n".join(lines)


def build_command(run: LocalRun, plan: Replay, place: RunDir) -> list[str]:
    """The command that takes the steps of `plan` again, in the directory `place`."""
    config = run.files.config(plan.process)
    argv = [sys.executable, "-m", MODULES[plan.process], "@", str(config), "--output-dir", str(place.root)]
    for tracker in ("wandb", "tensorboard", "trackio", "prometheus"):
        argv += [f"--{tracker}", "None"]
    if plan.process == "trainer":
        argv += ["--transport.type", "filesystem"]
        # Every version is a file.
        argv += ["--weight-broadcast.type", "filesystem", "--weight-broadcast.delta", "false"]
    if plan.start:
        argv += ["--ckpt.resume-step", str(plan.start)]
    else:
        argv += ["--resume", "false"]  # the configuration of a resumed run may set it
        if plan.process == "trainer":  # every version of it is published; sft publishes what it checkpoints
            argv += ["--ckpt", "None"]
    return argv


def _train(run: LocalRun, plan: Replay, place: RunDir) -> None:
    try:
        with Supervisor(place.logs, None, grace_s=5) as children:
            children.start(plan.process, build_command(run, plan, place))
            children.wait_for(lambda: has_step(place, plan.step), timeout_s=TIMEOUT_S, what=f"step {plan.step}")
    except ChildFailed as error:
        if not has_step(place, plan.step):  # the trainer exits after its last step
            raise RuntimeError(f"the trainer failed: {error}") from error


def _link(source: str, target: str) -> None:
    """Hard-link a file; copy it across file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def has_step(place: RunDir, step: int) -> bool:
    """Whether metrics and weights of a step are written, in any order: weights are published in the background."""
    rows, _ = read_rows(place.metrics)
    return step in complete_steps(place.weights) and any(row.get("step") == step and "loss/mean" in row for row in rows)
