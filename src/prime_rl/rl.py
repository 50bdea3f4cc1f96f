"""`rl`: starts inference server, orchestrator and trainer, shows what they say, and stops all when one falls.

config --> configs/{inference,orchestrator,trainer}.toml --> three processes --> the closing summary
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl.utils.command import run_command
from prime_rl.utils.output_dir import AVERAGE_DIR, BROADCASTS_DIR
from prime_rl.utils.process import ChildFailed, Supervisor, check_port_free, find_gpus, num_cores
from rollouts.training.steps import (
    complete_steps,
    find_damage,
    latest_step,
    parse_step,
    prune_steps,
    remove_unfinished,
    step_path,
)

if TYPE_CHECKING:
    from prime_rl.config import RLConfig
    from prime_rl.eval.config import EvalConfig
    from prime_rl.inference.config import InferenceConfig
    from prime_rl.utils.pydantic_config import BaseConfig

STEP_DIRS = ("rollouts", "weights", BROADCASTS_DIR, AVERAGE_DIR, "checkpoints")
CKPT_PARTS = ("trainer", "orchestrator")
RECORDS = ("metrics.jsonl", "samples.jsonl", "logs", "configs")


@dataclass(frozen=True)
class Placement:
    """GPU ids of the computing processes; None: the CPU, or no such process."""

    trainer: tuple[int, ...] | None
    inference: tuple[int, ...] | None
    teacher: tuple[int, ...] | None = None


def rl(config: RLConfig) -> int:
    """Run until trainer and orchestrator are through; returns the exit code."""
    from prime_rl.config_teacher import describe_taus
    from prime_rl.utils.hang import HangWatch
    from prime_rl.utils.progress import show_progress
    from prime_rl.utils.vf import check_environments

    teacher = config.orchestrator.teacher_model
    if teacher is not None and teacher.inspect_context is not None:
        return show_contexts(config)
    if config.deployment.type != "local":
        return hand_in(config)
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
    wire = config.weight_broadcast
    if wire.type != "filesystem" and wire.port:
        check_port_free(wire.host, wire.port, "weight_broadcast.port")
    with claim_output_dir(out):
        prepare_output_dir(config)
        config_paths = write_configs(config)
        try:
            with show_progress("steps", config.max_steps, lines=False) as bar, start_supervisor(out) as run:
                run.say(f"{describe(placement)}; logs in {out / 'logs'}; Ctrl-C stops everything")
                if config.orchestrator.teacher_model is not None:
                    run.say(describe_taus(config.trainer.loss))
                start_processes(run, config, config_paths, placement)
                watch = HangWatch(out, config.hang_timeout, lambda: run.children, run.find_pids, run.say)

                def tick() -> None:
                    bar.reach(latest_step(config.orchestrator.versions_dir) or 0)
                    watch.look()

                run.wait(["trainer", "orchestrator"], on_tick=tick)
        except ChildFailed as failure:
            return report_failure(failure)
        except KeyboardInterrupt:
            sys.stderr.write(describe_stop(out))
            raise
    sys.stdout.write(summarize(config, time.monotonic() - started))
    return 0


def hand_in(config: RLConfig) -> int:
    """Write the files of a deployment and hand it in; what one machine does whole prepares itself there."""
    from prime_rl.deployment.launch import build_files, deploy
    from prime_rl.fleet import is_whole, lay_out

    deployment = config.deployment
    assert deployment.type != "local"
    layout, configs = lay_out(config)
    build_files(layout, configs, deployment, config.output_dir)  # what is wrong with them is told before anything moves
    if not is_whole(deployment, config.inference is not None) and deployment.type != "kubernetes":
        with claim_output_dir(config.output_dir):
            prepare_output_dir(config)
            write_configs(config)
    return deploy(layout, configs, deployment, config.output_dir)


def preview(config: RLConfig) -> str | None:
    """What --dry-run shows of a deployment: its files."""
    if config.deployment.type == "local":
        return None
    from prime_rl.deployment.launch import build_files, show_files
    from prime_rl.fleet import lay_out

    layout, configs = lay_out(config)
    return show_files(build_files(layout, configs, config.deployment, config.output_dir))


def start_supervisor(out: Path) -> Supervisor:
    """Shows on the console what the processes say: above the progress bar, where there is one."""
    return Supervisor(out / "logs", console=sys.stdout)


def show_contexts(config: RLConfig) -> int:
    """Let the orchestrator show prompts, and start nothing; returns its exit code."""
    import subprocess
    import tempfile

    from prime_rl.utils.pydantic_config import write_config

    with tempfile.TemporaryDirectory(prefix="prime-rl-") as directory:
        path = Path(directory) / "orchestrator.toml"
        write_config(config.orchestrator, path)
        return subprocess.run([sys.executable, "-m", "prime_rl.orchestrator.orchestrator", "@", str(path)]).returncode


def start_processes(run: Supervisor, config: RLConfig, paths: dict[str, Path], placement: Placement) -> None:
    """Start all at once: trainer and orchestrator load while the engine does, and wait for it themselves."""
    from prime_rl.config import has_versions

    num_ranks = count_trainer_ranks(config, placement)
    servers = {"inference": placement.inference, "teacher_inference": placement.teacher}
    servers = {name: gpus for name, gpus in servers.items() if name in paths}
    num_compute = num_ranks + len(servers)
    for name, gpus in servers.items():
        argv = [sys.executable, "-m", "prime_rl.inference.server", "@", str(paths[name])]
        # A server that has versions is brought to the one in use, by the orchestrator, before it answers again.
        options = ["--server.await_weights", "true"] if name == "inference" or has_versions(config) else []
        env = compute_environment(gpus, num_compute)
        run.start(name, argv, env=env, max_restarts=config.max_restarts, restart_options=options)
    argv = [sys.executable, "-m", "prime_rl.orchestrator.orchestrator", "@", str(paths["orchestrator"])]
    run.start("orchestrator", argv, env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    argv = build_trainer_argv(paths["trainer"], num_ranks // config.trainer.parallel.model_ranks)
    run.start("trainer", argv, env=compute_environment(placement.trainer, num_compute))


def build_trainer_argv(config_path: Path, dp: int) -> list[str]:
    """The trainer, which starts its ranks itself."""
    argv = [sys.executable, "-m", "prime_rl.trainer.rl.train", "@", str(config_path)]
    return argv if dp == 1 else [*argv, "--parallel.dp", str(dp)]


def count_trainer_ranks(config: RLConfig, placement: Placement) -> int:
    """One rank per GPU of the trainer; on the CPU as many as `trainer.parallel` asks for."""
    return len(placement.trainer) if placement.trainer is not None else config.trainer.parallel.num_ranks


def compute_environment(gpu_ids: Sequence[int] | None, num_compute: int) -> dict[str, str]:
    """Which GPUs a process sees, or its share of the cores: two threads on one core are far slower than one."""
    if gpu_ids is not None:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpu_ids))}
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores() // num_compute))
    return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": threads}


def choose_placement(config: RLConfig) -> Placement:
    """The given GPU ids; else the first GPUs serve and the next train, one GPU does all, and none means the CPU.

    A teacher's server takes what the others leave, or shares the GPUs of inference. Where the configuration asks for
    the CPU by name, GPU ids mean nothing and are told so.
    """
    from prime_rl.config import given_gpus

    if find_cpu_keys(config):
        return Placement(None, None)
    visible = find_gpus()
    if (given := given_gpus(config)) and not visible:
        raise ValueError(
            f"{next(iter(given))} is set but this machine shows no NVIDIA GPU: leave it out to run on the CPU"
        )
    return place(config, visible)


def find_cpu_keys(config: RLConfig) -> bool:
    """Whether every computing process is told to use the CPU."""
    devices = [config.trainer.model.device]
    devices += [server.model.device for server in (config.inference, config.teacher_inference) if server is not None]
    return all(device == "cpu" for device in devices)


def place(config: RLConfig, visible: Sequence[int]) -> Placement:
    """Which of the visible GPUs each process gets."""
    wanted = check_serving_gpus(config.inference, config.inference_gpu_ids, "inference")
    num_teaching = check_serving_gpus(config.teacher_inference, config.teacher_gpu_ids, "teacher")
    if not visible:
        return Placement(None, None)
    serving = tuple(config.inference_gpu_ids or visible[:wanted]) if config.inference is not None else ()
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
            f"trainer.parallel asks for {parallel.num_ranks} ranks but inference leaves {len(free)} of {len(visible)} "
            "GPUs: lower trainer.parallel.dp"
        )
    teaching: tuple[int, ...] = ()
    if config.teacher_inference is not None:
        left = [gpu for gpu in visible if gpu not in (*serving, *training)]
        teaching = tuple(config.teacher_gpu_ids or left[:num_teaching] or serving[:num_teaching] or visible[:1])
    return Placement(tuple(training), serving or None, teaching or None)


def check_serving_gpus(server: InferenceConfig | None, ids: Sequence[int] | None, name: str) -> int:
    """How many GPUs a server uses; `ValueError` when other many are given."""
    wanted = server.parallel.tp * server.parallel.dp if server is not None else 1
    if server is not None and server.backend == "sglang":
        if ids:
            raise ValueError(f"{name}_gpu_ids = {list(ids)}: the SGLang server has its own GPUs, leave them out")
        return 0
    if ids and len(ids) != wanted:
        section = "parallel" if name == "inference" else "teacher_inference.parallel"
        raise ValueError(
            f"{name}_gpu_ids = {list(ids)}: an engine with {section}.tp * {section}.dp = {wanted} uses "
            f"{'one GPU, give one id' if wanted == 1 else f'{wanted} GPUs, give as many ids'}"
        )
    return wanted


def describe(placement: Placement) -> str:
    """Where things run, for the first line."""
    if placement.trainer is None:
        return f"everything on the CPU ({num_cores()} cores)"
    where = "elsewhere" if placement.inference is None else f"on GPU {placement.inference}"
    text = f"trainer on GPU {placement.trainer}, inference {where}"
    return text if placement.teacher is None else f"{text}, teacher on GPU {placement.teacher}"


def explain(config: RLConfig) -> list[str]:
    """What --dry-run says before the values: the map of GPUs, and the taus of a distillation."""
    from prime_rl.config import given_gpus
    from prime_rl.config_teacher import describe_taus

    given = [gpu for ids in given_gpus(config).values() for gpu in ids]
    on_cpu = find_cpu_keys(config)
    placement = Placement(None, None) if on_cpu else place(config, sorted({*given, *find_gpus()}))
    lines = [describe(placement)] if on_cpu or placement.trainer is None else draw_map(placement)
    taught = config.orchestrator.teacher_model is not None
    return [*lines, *([describe_taus(config.trainer.loss)] if taught else [])]


def draw_map(placement: Placement) -> list[str]:
    """One line per process with its GPUs."""
    rows = {"inference": placement.inference, "teacher": placement.teacher, "trainer": placement.trainer}
    return [f"{name:<9} GPU {','.join(map(str, gpus))}" for name, gpus in rows.items() if gpus is not None]


def check_model(config: RLConfig) -> None:
    """A wrong model name fails here, in a sentence; a hub model is fetched once and not by three processes."""
    from prime_rl.utils.tokenizer import resolve_model_dir

    resolve_model_dir(config.model.name)


@contextmanager
def claim_output_dir(out: Path) -> Iterator[None]:
    """Two runs that write into one directory would mix; the lock goes when this process does."""
    import fcntl

    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"output_dir {out} is in use by another rl: choose another --output-dir") from None
        yield


def prepare_output_dir(config: RLConfig) -> None:
    """Nothing of an earlier run is mixed in or thrown away unasked; what a crash left half-written is swept away."""
    out = config.output_dir
    if config.clean and config.resume:
        raise ValueError("clean would remove the steps that resume goes on from: leave one of them out")
    for name in STEP_DIRS:
        remove_unfinished(out / name)
    if config.ckpt is not None and config.ckpt.resume_step is not None:
        if config.ckpt.resume_step == -1:
            set_damaged_aside(out / "checkpoints")
        drop_later_batches(out, config.ckpt.resume_step)
        prune_steps(out / BROADCASTS_DIR, lambda step: False)  # whoever offered them has gone
        return
    found = {name: steps for name in STEP_DIRS if (steps := find_steps(out / name))}
    if found and not config.clean:
        listed = ", ".join(f"{name} up to step_{max(steps)}" for name, steps in found.items())
        raise ValueError(
            f"output_dir {out} holds an earlier run ({listed})\n"
            "  choose another --output-dir, go on with it by --resume, or remove its steps with --clean"
        )
    for name in found:
        check_model_is_elsewhere(config, out / name)
    archive_records(out)
    for name, steps in found.items():
        remove_steps(out / name, steps)


def set_damaged_aside(root: Path) -> None:
    """The newest commit becomes the newest that can be trusted; a damaged one is kept under another name."""
    for step in reversed(complete_steps(root, CKPT_PARTS)):
        damage = next(filter(None, (find_damage(step_path(root, step) / part) for part in CKPT_PARTS)), None)
        if damage is None:
            return
        aside = root / f"damaged-{step_path(root, step).name}-{time.time_ns()}"
        step_path(root, step).rename(aside)
        sys.stdout.write(f"warning: checkpoint {step} is damaged ({damage}): set aside as {aside.name}\n")


def drop_later_batches(out: Path, resume_step: int) -> None:
    """Batches after the checkpoint are of the interrupted attempt: gone before a trainer can take one for new.

    Raises `ValueError` for a checkpoint that does not exist; nothing is removed then.
    """
    commits = complete_steps(out / "checkpoints", CKPT_PARTS)
    if resume_step == -1:
        resume_step = commits[-1] if commits else 0
        where = f"goes on from step {resume_step}" if commits else "no checkpoint yet, starts from the beginning"
        sys.stdout.write(f"note: ckpt.resume_step = -1 in {out}: {where}\n")
    elif resume_step not in commits:
        listed = ", ".join(map(str, commits)) or "none"
        raise ValueError(
            f"ckpt.resume_step = {resume_step}: {out / 'checkpoints'} has no complete checkpoint of that step "
            f"(complete: {listed})\n  name one of them, or -1 for the latest"
        )
    prune_steps(out / "rollouts", lambda step: step <= resume_step)


def find_steps(root: Path) -> list[int]:
    """Every `step_N` below `root`, complete or not."""
    return [step for path in root.glob("step_*") if (step := parse_step(path.name)) is not None]


def check_model_is_elsewhere(config: RLConfig, doomed: Path) -> None:
    """--clean must not remove the weights that the run is to start from."""
    if Path(config.model.name).resolve().is_relative_to(doomed.resolve()):
        raise ValueError(
            f"model.name {config.model.name} lies in {doomed}, which --clean would empty: choose another --output-dir"
        )


def remove_steps(root: Path, steps: Sequence[int]) -> None:
    """Remove `step_N` of an earlier run; takes the marker away first, so that nobody reads half of one."""
    import shutil

    for step in steps:
        (step_path(root, step) / "STABLE").unlink(missing_ok=True)
        shutil.rmtree(step_path(root, step))


def archive_records(out: Path) -> None:
    """Metrics, samples, logs and configs of an earlier attempt move to `attempts/N`; they are never deleted."""
    old = [out / name for name in RECORDS if (out / name).exists()]
    if not old:
        return
    attempts = out / "attempts"
    number = 1 + max((int(p.name) for p in attempts.glob("*") if p.name.isdigit()), default=0)
    (attempts / str(number)).mkdir(parents=True)
    for path in old:
        path.rename(attempts / str(number) / path.name)


def write_configs(config: RLConfig) -> dict[str, Path]:
    """What each process will read, the whole, and a matching evaluation, as TOML below `configs/`."""
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
    """The evaluation of this run's environments, sampled as in training."""
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
    """Say which process fell and why; input that a process refused is reported as this command's own."""
    if failure.wrong_input is not None:
        raise ValueError(failure.wrong_input) from failure
    sys.stderr.write(f"error: {failure}\nThe other processes were stopped.\n")
    return 1


def describe_stop(out: Path) -> str:
    """How far a run came that was stopped, and how to go on."""
    weights = [step for name in ("weights", BROADCASTS_DIR) for step in complete_steps(out / name)]
    commits = complete_steps(out / "checkpoints", CKPT_PARTS)
    how = f"checkpoint of step {commits[-1]}: go on with --resume" if commits else "no checkpoint (--ckpt)"
    return f"\nstopped after step {max(weights, default=0)}; {how}\n"


def summarize(config: RLConfig, seconds: float) -> str:
    """Steps, time, rewards, where everything lies, and what to do next."""
    from rollouts.training.metrics import load_jsonl

    out = config.output_dir
    rows = [r for r in load_jsonl(out / "metrics.jsonl") if r.get("process") == "orchestrator" and "reward/mean" in r]
    steps = complete_steps(out / "weights")
    newest = step_path(out / "weights", steps[-1]) if steps else out / "weights"
    rewards = f"{rows[0]['reward/mean']:.4f} -> {rows[-1]['reward/mean']:.4f}" if rows else "none"
    table = {
        "steps": f"{rows[-1]['step'] if rows else 0} in {seconds:.1f} s",
        "reward": f"{rewards} (mean of a batch, first -> last)",
        "weights": newest,
        "metrics": out / "metrics.jsonl",
        "samples": out / "samples.jsonl",
        "logs": out / "logs",
        "next": f"env eval @ {out / 'configs' / 'eval.toml'} --model.name {newest}",
    }
    return "\n" + "\n".join(f"  {name:<8} {value}" for name, value in table.items()) + "\n"


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
