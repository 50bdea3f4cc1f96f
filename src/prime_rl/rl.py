"""`rl`: starts and supervises inference server, orchestrator and trainer; stops all of them when one fails.

config --> configs/{inference,orchestrator,trainer}.toml --> three processes --> summary
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.configuration.command import run_command
from prime_rl.runtime.process import ChildFailed, Supervisor, check_port_free, find_gpus, num_cores
from prime_rl.runtime.run_dir import (
    ATTEMPTS_FILE,
    BROADCASTS_DIR,
    STEP_DIRS,
    check_resumable,
    describe_used,
    find_used,
    set_aside,
    set_aside_later,
)
from prime_rl.runtime.run_state import STATE_FILE, StateRecorder
from rollouts.training.steps import (
    complete_steps,
    find_damage,
    latest_step,
    prune_steps,
    remove_unfinished,
    step_path,
)

if TYPE_CHECKING:
    from prime_rl.config import RLConfig
    from prime_rl.eval.config import EvalConfig
    from prime_rl.inference.config import InferenceConfig
    from prime_rl.utils.pydantic_config import BaseConfig

CKPT_PARTS = ("trainer", "orchestrator")
RECORDS = ("metrics.jsonl", "samples.jsonl", "trainer_logprobs.jsonl", ATTEMPTS_FILE, "logs", "configs", STATE_FILE)
OR_CLEAN = ", or remove its steps with --clean"


@dataclass(frozen=True)
class GpuAssignment:
    """GPU ids of the computing processes; None: the CPU, or no such process."""

    trainer: tuple[int, ...] | None
    inference: tuple[int, ...] | None
    teacher: tuple[int, ...] | None = None


def rl(config: RLConfig) -> int:
    """Run until trainer and orchestrator have finished; returns the exit code."""
    from prime_rl.config_teacher import describe_taus
    from prime_rl.runtime.hang_watchdog import HangWatchdog
    from prime_rl.telemetry.progress import show_progress
    from prime_rl.utils.vf import check_environments

    teacher = config.orchestrator.teacher_model
    if teacher is not None and teacher.inspect_context is not None:
        return show_contexts(config)
    if config.deployment.type != "local":
        return submit_deployment(config)
    started = time.monotonic()
    out = config.output_dir
    placement = choose_placement(config)
    check_model(config)
    check_environments([*config.orchestrator.env, *(config.orchestrator.eval.env if config.orchestrator.eval else ())])
    if config.inference is not None:
        check_port_free(config.inference.server.host, config.inference.server.port)
    if (server := config.teacher_inference) is not None:
        check_port_free(server.server.host, server.server.port, "teacher_inference.server.port")
    if config.transport.type == "zmq":
        check_port_free(config.transport.host, config.transport.port, "transport.port")
    broadcast = config.weight_broadcast
    if broadcast.type != "filesystem" and broadcast.port:
        check_port_free(broadcast.host, broadcast.port, "weight_broadcast.port")
    with lock_output_dir(out):
        prepare_output_dir(config)
        config_paths = write_configs(config)
        try:
            with (
                StateRecorder(out, "rl") as state,
                show_progress("steps", config.max_steps, lines=False) as bar,
                start_supervisor(out) as run,
            ):
                run.print(f"{describe(placement)}; logs in {out / 'logs'}; Ctrl-C stops everything")
                if config.orchestrator.teacher_model is not None:
                    run.print(describe_taus(config.trainer.loss))
                start_processes(run, config, config_paths, placement)
                watch = HangWatchdog(out, config.hang_timeout, lambda: run.children, run.find_pids, run.print)

                def tick() -> None:
                    state.beat()
                    bar.set_done(latest_step(config.orchestrator.versions_dir) or 0)
                    watch.check()

                run.wait(["trainer", "orchestrator"], on_tick=tick)
        except ChildFailed as failure:
            return report_failure(failure)
        except KeyboardInterrupt:
            sys.stderr.write(describe_stop(out))
            raise
    sys.stdout.write(summarize(config, time.monotonic() - started))
    return 0


def submit_deployment(config: RLConfig) -> int:
    """Write the files of a deployment and submit it. A single-node run prepares its output directory on the node."""
    from prime_rl.cluster_layout import is_single_node, lay_out
    from prime_rl.deployment.launch import build_files, deploy

    deployment = config.deployment
    assert deployment.type != "local"
    layout, configs = lay_out(config)
    build_files(layout, configs, deployment, config.output_dir)  # raises before any file is moved
    if not is_single_node(deployment, config.inference is not None) and deployment.type != "kubernetes":
        with lock_output_dir(config.output_dir):
            prepare_output_dir(config)
            write_configs(config)
    return deploy(layout, configs, deployment, config.output_dir)


def preview(config: RLConfig) -> str | None:
    """The files of a deployment, for --dry-run."""
    if config.deployment.type == "local":
        return None
    from prime_rl.cluster_layout import lay_out
    from prime_rl.deployment.launch import build_files, show_files

    layout, configs = lay_out(config)
    return show_files(build_files(layout, configs, config.deployment, config.output_dir))


def start_supervisor(out: Path) -> Supervisor:
    """A supervisor that prints the processes' output to the console, above the progress bar if there is one."""
    return Supervisor(out / "logs", console=sys.stdout)


def show_contexts(config: RLConfig) -> int:
    """Run the orchestrator only to print prompts with their contexts; returns its exit code."""
    import subprocess
    import tempfile

    from prime_rl.utils.pydantic_config import write_config

    with tempfile.TemporaryDirectory(prefix="prime-rl-") as directory:
        path = Path(directory) / "orchestrator.toml"
        write_config(config.orchestrator, path)
        return subprocess.run([sys.executable, "-m", "prime_rl.orchestrator.orchestrator", "@", str(path)]).returncode


def start_processes(run: Supervisor, config: RLConfig, paths: dict[str, Path], placement: GpuAssignment) -> None:
    """Start all processes at once; trainer and orchestrator load in parallel with the engine and wait for it."""
    from prime_rl.config import has_versions

    num_ranks = count_trainer_ranks(config, placement)
    servers = {"inference": placement.inference, "teacher_inference": placement.teacher}
    servers = {name: gpus for name, gpus in servers.items() if name in paths}
    num_compute = num_ranks + len(servers)
    for name, gpus in servers.items():
        argv = [sys.executable, "-m", "prime_rl.inference.server", "@", str(paths[name])]
        # A restarted server rejects requests until the orchestrator has updated it to the current version.
        options = ["--server.wait_for_weights", "true"] if name == "inference" or has_versions(config) else []
        env = compute_environment(gpus, num_compute)
        run.start(name, argv, env=env, max_restarts=config.max_restarts, restart_options=options)
    argv = [sys.executable, "-m", "prime_rl.orchestrator.orchestrator", "@", str(paths["orchestrator"])]
    run.start("orchestrator", argv, env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    argv = build_trainer_argv(paths["trainer"], num_ranks // config.trainer.parallel.model_ranks)
    run.start("trainer", argv, env=compute_environment(placement.trainer, num_compute))


def build_trainer_argv(config_path: Path, dp: int) -> list[str]:
    """Command line of the trainer, which starts its own ranks."""
    argv = [sys.executable, "-m", "prime_rl.trainer.rl.train", "@", str(config_path)]
    return argv if dp == 1 else [*argv, "--parallel.dp", str(dp)]


def count_trainer_ranks(config: RLConfig, placement: GpuAssignment) -> int:
    """One rank per GPU of the trainer; on the CPU the number of ranks of `trainer.parallel`."""
    return len(placement.trainer) if placement.trainer is not None else config.trainer.parallel.num_ranks


def compute_environment(gpu_ids: Sequence[int] | None, num_compute: int) -> dict[str, str]:
    """Environment variables that assign GPUs, or a share of the cores: oversubscribed threads are far slower."""
    if gpu_ids is not None:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpu_ids))}
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores() // num_compute))
    return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": threads}


def choose_placement(config: RLConfig) -> GpuAssignment:
    """The configured GPU ids; default: the first GPUs for inference, the next for training, one shared GPU, or the CPU.

    A teacher server gets the remaining GPUs, or shares those of inference. GPU ids are ignored, with a note, if the
    devices are set to the CPU.
    """
    from prime_rl.config import given_gpus

    if find_cpu_keys(config):
        return GpuAssignment(None, None)
    visible = find_gpus()
    if (given := given_gpus(config)) and not visible:
        raise ValueError(
            f"{next(iter(given))} is set but this machine has no visible NVIDIA GPU: leave it out to run on the CPU"
        )
    return place(config, visible)


def find_cpu_keys(config: RLConfig) -> bool:
    """Whether the device of every computing process is set to the CPU."""
    devices = [config.trainer.model.device]
    devices += [server.model.device for server in (config.inference, config.teacher_inference) if server is not None]
    return all(device == "cpu" for device in devices)


def place(config: RLConfig, visible: Sequence[int]) -> GpuAssignment:
    """Assign the visible GPUs to the processes."""
    num_serving = check_serving_gpus(config.inference, config.inference_gpu_ids, "inference")
    num_teacher = check_serving_gpus(config.teacher_inference, config.teacher_gpu_ids, "teacher")
    if not visible:
        return GpuAssignment(None, None)
    serving = tuple(config.inference_gpu_ids or visible[:num_serving]) if config.inference is not None else ()
    free = [gpu for gpu in visible if gpu not in (*serving, *(config.teacher_gpu_ids or ()))] or list(visible)
    parallel = config.trainer.parallel
    if config.trainer_gpu_ids:
        try:
            parallel.resolve(len(config.trainer_gpu_ids))
        except ValueError as error:
            raise ValueError(
                f"trainer_gpu_ids = {config.trainer_gpu_ids}, each GPU is a rank: trainer.{error}"
            ) from error
    training = config.trainer_gpu_ids or free[: parallel.num_ranks]
    if not config.trainer_gpu_ids and len(training) < parallel.num_ranks:
        raise ValueError(
            f"trainer.parallel needs {parallel.num_ranks} ranks but inference leaves {len(free)} of {len(visible)} "
            "GPUs: lower trainer.parallel.dp"
        )
    teaching: tuple[int, ...] = ()
    if config.teacher_inference is not None:
        left = [gpu for gpu in visible if gpu not in (*serving, *training)]
        teaching = tuple(config.teacher_gpu_ids or left[:num_teacher] or serving[:num_teacher] or visible[:1])
    return GpuAssignment(tuple(training), serving or None, teaching or None)


def check_serving_gpus(server: InferenceConfig | None, ids: Sequence[int] | None, name: str) -> int:
    """Number of GPUs that a server uses; `ValueError` if a different number of ids is given."""
    num_gpus = server.parallel.tp * server.parallel.dp if server is not None else 1
    if server is not None and server.backend == "sglang":
        if ids:
            raise ValueError(f"{name}_gpu_ids = {list(ids)}: the SGLang server has its own GPUs, leave them out")
        return 0
    if ids and len(ids) != num_gpus:
        section = "parallel" if name == "inference" else "teacher_inference.parallel"
        raise ValueError(
            f"{name}_gpu_ids = {list(ids)}: an engine with {section}.tp * {section}.dp = {num_gpus} uses "
            f"{'one GPU, give one id' if num_gpus == 1 else f'{num_gpus} GPUs, give as many ids'}"
        )
    return num_gpus


def describe(placement: GpuAssignment) -> str:
    """One line that describes the devices of the processes."""
    if placement.trainer is None:
        return f"all processes on the CPU ({num_cores()} cores)"
    where = "elsewhere" if placement.inference is None else f"on GPU {placement.inference}"
    text = f"trainer on GPU {placement.trainer}, inference {where}"
    return text if placement.teacher is None else f"{text}, teacher on GPU {placement.teacher}"


def explain(config: RLConfig) -> list[str]:
    """Header of --dry-run: GPU assignment, and the loss weights of a distillation."""
    from prime_rl.config import given_gpus
    from prime_rl.config_teacher import describe_taus

    given = [gpu for ids in given_gpus(config).values() for gpu in ids]
    on_cpu = find_cpu_keys(config)
    placement = GpuAssignment(None, None) if on_cpu else place(config, sorted({*given, *find_gpus()}))
    lines = [describe(placement)] if on_cpu or placement.trainer is None else format_gpu_map(placement)
    has_teacher = config.orchestrator.teacher_model is not None
    return [*lines, *([describe_taus(config.trainer.loss)] if has_teacher else [])]


def format_gpu_map(placement: GpuAssignment) -> list[str]:
    """One line per process with its GPUs."""
    rows = {"inference": placement.inference, "teacher": placement.teacher, "trainer": placement.trainer}
    return [f"{name:<9} GPU {','.join(map(str, gpus))}" for name, gpus in rows.items() if gpus is not None]


def check_model(config: RLConfig) -> None:
    """Fail early on a wrong model name; download a hub model once instead of in three processes."""
    from prime_rl.runtime.tokenizer import resolve_model_dir

    resolve_model_dir(config.model.name)


@contextmanager
def lock_output_dir(out: Path) -> Iterator[None]:
    """Exclusive lock on the output directory of a run, released when this process exits."""
    import fcntl

    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"output_dir {out} is in use by another rl: choose another --output-dir") from None
        yield


def prepare_output_dir(config: RLConfig) -> None:
    """Separate the run from files of an earlier one, remove incomplete steps, and set up --resume or --clean."""
    out = config.output_dir
    if config.clean and config.resume:
        raise ValueError("clean would remove the steps that resume needs: leave one of them out")
    for name in STEP_DIRS:
        remove_unfinished(out / name)
    if config.ckpt is not None and config.ckpt.resume_step is not None:
        if config.ckpt.resume_step == -1:
            quarantine_corrupt_checkpoints(out / "checkpoints")
        prepare_resume(out, config.ckpt.resume_step)
        return
    used = find_used(out)
    if used and not config.clean:
        raise ValueError(describe_used(out, CKPT_PARTS, resume="--resume", options=OR_CLEAN))
    for name in used:
        check_model_not_removed(config, out / name)
    set_aside(out, [out / name for name in RECORDS])
    for name, steps in used.items():
        remove_steps(out / name, steps)


def quarantine_corrupt_checkpoints(root: Path) -> None:
    """Rename corrupt checkpoints that are newer than the newest intact one, so that resuming skips them."""
    for step in reversed(complete_steps(root, CKPT_PARTS)):
        damage = next(filter(None, (find_damage(step_path(root, step) / part) for part in CKPT_PARTS)), None)
        if damage is None:
            return
        aside = root / f"damaged-{step_path(root, step).name}-{time.time_ns()}"
        step_path(root, step).rename(aside)
        sys.stdout.write(f"warning: checkpoint {step} is damaged ({damage}): renamed to {aside.name}\n")


def prepare_resume(out: Path, resume_step: int) -> None:
    """Move steps that the interrupted attempt wrote after the checkpoint, before a process can read them as new.

    Raises `ValueError` if the checkpoint does not exist, or if there is none in a directory with trained steps.
    """
    commits = complete_steps(out / "checkpoints", CKPT_PARTS)
    if resume_step == -1:
        check_resumable(out, CKPT_PARTS, OR_CLEAN)
        resume_step = commits[-1] if commits else 0
        where = f"resuming from step {resume_step}" if commits else "no checkpoint yet, starting from the beginning"
        sys.stdout.write(f"note: ckpt.resume_step = -1 in {out}: {where}\n")
    elif resume_step not in commits:
        listed = ", ".join(map(str, commits)) or "none"
        raise ValueError(
            f"ckpt.resume_step = {resume_step}: {out / 'checkpoints'} has no complete checkpoint of that step "
            f"(complete: {listed})\n  name one of them, or -1 for the latest"
        )
    prune_steps(out / BROADCASTS_DIR, lambda step: False)  # their sender has exited
    if (folder := set_aside_later(out, dict.fromkeys(STEP_DIRS, resume_step))) is not None:
        sys.stdout.write(f"note: steps after {resume_step} of the interrupted attempt moved to {folder}\n")


def check_model_not_removed(config: RLConfig, removed: Path) -> None:
    """`ValueError` if --clean would remove the initial weights of the run."""
    if Path(config.model.name).resolve().is_relative_to(removed.resolve()):
        raise ValueError(
            f"model.name {config.model.name} is in {removed}, which --clean would empty: choose another --output-dir"
        )


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
        "rl": config,
        "orchestrator": config.orchestrator,
        "trainer": config.trainer,
        "eval": build_eval_config(config),
    }
    if config.inference is not None:
        parts["inference"] = config.inference
    if config.teacher_inference is not None:
        parts["teacher_inference"] = config.teacher_inference
    paths = {name: config.output_dir / "configs" / f"{name}.toml" for name in parts}
    for name, part in parts.items():
        write_config(part, paths[name])
    return paths


def build_eval_config(config: RLConfig) -> EvalConfig:
    """An evaluation config with the environments and the sampling parameters of the run."""
    from prime_rl.eval.config import EvalConfig

    return EvalConfig.model_validate(
        {
            "model": {"name": config.model.name},
            "env": [env.plain() for env in config.orchestrator.env],
            "sampling": config.orchestrator.sampling.model_dump(),
            "output_dir": config.output_dir,
        }
    )


def report_failure(failure: ChildFailed) -> int:
    """Print which process failed and why; invalid input of a process is raised as `ValueError` of this command."""
    if failure.wrong_input is not None:
        raise ValueError(failure.wrong_input) from failure
    sys.stderr.write(f"error: {failure}\nThe other processes were stopped.\n")
    return 1


def describe_stop(out: Path) -> str:
    """Progress of a stopped run and how to continue it."""
    weights = [step for name in ("weights", BROADCASTS_DIR) for step in complete_steps(out / name)]
    commits = complete_steps(out / "checkpoints", CKPT_PARTS)
    how = f"checkpoint of step {commits[-1]}: continue with --resume" if commits else "no checkpoint (--ckpt)"
    versions = complete_steps(out / "weights")
    if versions and not commits:
        how += f"; its last weights: --model.name {step_path(out / 'weights', versions[-1])} --output-dir NEW"
    return f"\nStopped after step {max(weights, default=0)}; {how}\n"


def summarize(config: RLConfig, seconds: float) -> str:
    """Table of steps, time, rewards or distance to the teacher, output paths and the next command."""
    from rollouts.training.metrics import load_last_attempts

    out, loss = config.output_dir, config.trainer.loss
    rows = list(load_last_attempts(out / "metrics.jsonl"))
    steps = complete_steps(out / "weights")
    newest = step_path(out / "weights", steps[-1]) if steps else out / "weights"
    batches = [row["step"] for row in rows if row.get("process") == "orchestrator" and "reward/mean" in row]
    table: dict[str, object] = {"steps": f"{batches[-1] if batches else 0} in {seconds:.1f} s"}
    has_teacher = config.orchestrator.teacher_model is not None and bool(loss.teacher_tau or loss.student_tau)
    if has_teacher:
        table |= summarize_distillation(rows)
    if not has_teacher or loss.adv_tau:
        table["reward"] = first_to_last(rows, "reward/mean")
    table |= {
        "weights": newest,
        "metrics": out / "metrics.jsonl",
        "samples": out / "samples.jsonl",
        "logs": out / "logs",
        "next": f"env eval @ {out / 'configs' / 'eval.toml'} --model.name {newest}",
    }
    width = max(8, *map(len, table))
    return "\n" + "\n".join(f"  {name:<{width}} {value}" for name, value in table.items()) + "\n"


def summarize_distillation(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Distance to the teacher, gap closed and retention per environment, and the number of unscored samples."""
    table = {"teacher KL": first_to_last(rows, "teacher_kl/mean")}
    marker = "/student/avg"
    latest = {
        key.removeprefix("distill/").removesuffix(marker): row
        for row in rows
        for key in row
        if key.startswith("distill/") and key.endswith(marker)
    }
    for env, row in latest.items():
        metrics = {key.removeprefix(f"distill/{env}/"): value for key, value in row.items()}
        scores = f"student {metrics['student/avg']:.4f}, step {row['step']}"
        if (retention := metrics.get("retention")) is not None:
            table[env] = f"retention {retention:.2f} ({scores})"
        elif (closed := metrics.get("gap_closed")) is not None:
            interval = f"{metrics['gap_closed/ci_low']:.2f} to {metrics['gap_closed/ci_high']:.2f}"
            table[env] = f"gap closed {closed:.2f}, {interval} (teacher {metrics['teacher_context/avg']:.4f}, {scores})"
        else:
            table[env] = f"gap not significant ({scores})"
    skipped = sum(value for row in rows for key, value in row.items() if key.startswith("teacher/skipped/"))
    if skipped:
        table["unscored"] = f"{skipped:.0f} samples were not scored by the teacher and left out"
    return table


def first_to_last(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """First and last value of a metric that is logged once per batch."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return f"{values[0]:.4f} -> {values[-1]:.4f} (batch mean, first -> last)" if values else "none"


def main() -> None:
    """Console script `rl`."""
    run_command(
        "rl",
        "prime_rl.config:RLConfig",
        rl,
        summary="Train a model by asynchronous RL: starts inference server, orchestrator and trainer together.",
        explain=explain,
        preview=preview,
    )


if __name__ == "__main__":
    main()
