"""`rl`: starts and supervises inference server, orchestrator and trainer; stops all of them when one fails.

config --> configs/{inference,orchestrator,trainer}.toml --> three processes --> summary
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl.configuration.command import exit_with_errors, run_command
from prime_rl.launcher.gpus import (
    GpuAssignment,
    assign_gpus,
    compute_environment,
    count_trainer_ranks,
    describe_assignment,
    explain_assignment,
)
from prime_rl.launcher.output_dir import prepare_output_dir, write_configs
from prime_rl.launcher.summary import describe_stop, summarize
from prime_rl.runtime.machine import SHARED_GPU_VARIABLE, check_port_free, read_cpu_seconds
from prime_rl.runtime.process import ChildFailed, Supervisor
from prime_rl.runtime.run_dir import CKPT_PARTS, RunDir, lock_output_dir
from prime_rl.runtime.run_page import offer_page
from prime_rl.runtime.run_state import StateRecorder
from rollouts.training.steps import latest_step

if TYPE_CHECKING:
    from prime_rl.config import RLConfig
    from prime_rl.inference.config import InferenceConfig


def rl(config: RLConfig) -> int:
    """Run until trainer and orchestrator have finished; returns the exit code."""
    teacher = config.orchestrator.teacher_model
    if teacher is not None and teacher.inspect_context is not None:
        return show_contexts(config)
    if config.deployment.type != "local":
        return submit_deployment(config)
    started, cpu_started = time.monotonic(), read_cpu_seconds()
    gpus = assign_gpus(config)
    check_inputs(config)
    with lock_output_dir(config.output_dir, *CKPT_PARTS):
        prepare_output_dir(config)
        try:
            with offer_page(config.output_dir, config.open):
                run_processes(config, write_configs(config), gpus)
        except ChildFailed as failure:
            return report_failure(failure)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(describe_stop(config.output_dir)) from None
        except SystemExit:  # SIGTERM
            sys.stderr.write(f"{describe_stop(config.output_dir)}\n")
            raise
    sys.stdout.write(summarize(config, time.monotonic() - started, read_cpu_seconds() - cpu_started))
    return 0


def check_inputs(config: RLConfig) -> None:
    """Fail before a process starts: logs, trackers, loss, model, environments, ports.

    Downloads a hub model once instead of three times.
    """
    from prime_rl.config_teacher import check_contexts, check_tokenizer
    from prime_rl.runtime.tokenizer import check_weights, has_chat_template, resolve_model_dir
    from prime_rl.telemetry.trackers import check_prometheus, check_trackers
    from prime_rl.utils.logger import find_level
    from prime_rl.utils.vf import check_environments, check_text_prompts

    servers = [server for server in (config.inference, config.teacher_inference) if server is not None]
    for log in (config.trainer.log, config.orchestrator.log, *(server.log for server in servers)):
        find_level(log.level)
    check_trackers(config.trainer)
    check_trackers(config.orchestrator)
    port = check_prometheus(config.trainer, "trainer", "trainer.")
    if check_prometheus(config.orchestrator, "orchestrator", "orchestrator.") == port and port is not None:
        raise ValueError(f"trainer.prometheus.port and orchestrator.prometheus.port are both {port}: choose two ports")
    advantage = config.orchestrator.advantage
    config.trainer.loss.import_custom()
    if advantage is not None:
        advantage.import_custom()
    model_dir = resolve_model_dir(config.model.name)
    check_weights(model_dir, config.model.debug.random_init)
    check_contexts(config.orchestrator, config.inference, config.teacher_inference)
    check_tokenizer(config.model.name, config.teacher_inference)
    environments = [*config.orchestrator.env, *config.orchestrator.eval_envs]
    check_environments(environments)
    if config.inference is not None:
        if not (has_chat_template(model_dir) or brings_chat_template(config.inference)):
            check_text_prompts(environments)
        check_port_free(config.inference.server.host, config.inference.server.port)
    if (server := config.teacher_inference) is not None:
        check_port_free(server.server.host, server.server.port, "teacher_inference.server.port")
    if config.transport.type == "zmq":
        check_port_free(config.transport.host, config.transport.port, "transport.port")
    broadcast = config.weight_broadcast
    if broadcast.type != "filesystem" and broadcast.port:
        check_port_free(broadcast.host, broadcast.port, "weight_broadcast.port")


def brings_chat_template(server: InferenceConfig) -> bool:
    """Whether the server may render messages without a template in the model's files."""
    is_option = "chat_template" in (name.replace("-", "_") for name in server.vllm)
    return is_option or server.model.trust_remote_code  # code of a tokenizer may contain one


def run_processes(config: RLConfig, config_paths: Mapping[str, Path], gpus: GpuAssignment) -> None:
    """Start all processes and wait for trainer and orchestrator; all are stopped on return.

    Raises `ChildFailed` if one of them fails.
    """
    from prime_rl.config_teacher import describe_taus
    from prime_rl.runtime.hang_watchdog import HangWatchdog
    from prime_rl.telemetry.progress import show_progress

    out, logs = config.output_dir, RunDir(config.output_dir).logs
    with (
        StateRecorder(out, "rl"),
        show_progress("steps", config.max_steps, lines=False) as bar,
        tempfile.TemporaryDirectory(prefix="prime-rl-cores-") as leases,
        Supervisor(logs, console=sys.stdout) as run,  # above the progress bar, which replaces sys.stdout
    ):
        run.print(f"{describe_assignment(gpus)}; logs in {logs}; Ctrl-C stops everything")
        if config.orchestrator.teacher_model is not None:
            run.print(describe_taus(config.trainer.loss))
        start_processes(run, config, config_paths, gpus, Path(leases))
        watchdog = HangWatchdog(out, config.hang_timeout, lambda: run.children, run.find_pids, run.print)
        for _ in run.poll(["trainer", "orchestrator"]):
            bar.set_done(latest_step(config.orchestrator.versions_dir) or 0)
            watchdog.check()


def start_processes(
    run: Supervisor, config: RLConfig, paths: Mapping[str, Path], gpus: GpuAssignment, leases: Path
) -> None:
    """Start all processes at once; trainer and orchestrator load in parallel with the engine and wait for it."""
    from prime_rl.config import teacher_follows_policy

    num_ranks = count_trainer_ranks(config, gpus)
    servers = {"inference": gpus.inference, "teacher_inference": gpus.teacher}
    servers = {name: ids for name, ids in servers.items() if name in paths}
    num_compute = num_ranks + len(servers)

    def build_environment(ids: Sequence[int] | None) -> dict[str, str]:
        shared = {SHARED_GPU_VARIABLE: "1"} if gpus.is_shared(ids) else {}
        return compute_environment(ids, num_compute, leases) | shared

    for name, ids in servers.items():
        argv = [sys.executable, "-m", "prime_rl.inference.server", "@", str(paths[name])]
        # A restarted server rejects requests until the orchestrator has updated it to the current version.
        options = ["--server.wait_for_weights", "true"] if name == "inference" or teacher_follows_policy(config) else []
        env = build_environment(ids)
        run.start(name, argv, env=env, max_restarts=config.max_restarts, restart_options=options)
    argv = [sys.executable, "-m", "prime_rl.orchestrator.orchestrator", "@", str(paths["orchestrator"])]
    run.start("orchestrator", argv, env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    argv = build_trainer_argv(paths["trainer"], num_ranks // config.trainer.parallel.model_ranks)
    run.start("trainer", argv, env=build_environment(gpus.trainer))


def build_trainer_argv(config_path: Path, dp: int) -> list[str]:
    """Command line of the trainer, which starts its own ranks."""
    argv = [sys.executable, "-m", "prime_rl.trainer.rl.train", "@", str(config_path)]
    return argv if dp == 1 else [*argv, "--parallel.dp", str(dp)]


def report_failure(failure: ChildFailed) -> int:
    """Print which process failed and why; invalid input of a process is raised as `ValueError` of this command."""
    if failure.wrong_input is not None:
        raise ValueError(failure.wrong_input) from failure
    sys.stderr.write(f"error: {failure}\nThe other processes were stopped.\n")
    return 1


def submit_deployment(config: RLConfig) -> int:
    """Write the files of a deployment and submit it. A single node prepares its output directory, without --clean."""
    from prime_rl.deployment.launch import build_files, deploy
    from prime_rl.launcher.cluster_layout import is_single_node, plan_cluster

    deployment = config.deployment
    assert deployment.type != "local"
    layout, configs = plan_cluster(config)
    build_files(layout, configs, deployment, config.output_dir)  # raises before any file is moved
    on_one_node = is_single_node(deployment, config.inference is not None)
    if config.clean and deployment.type == "kubernetes" and not on_one_node:
        raise ValueError("clean cannot reach the files on deployment.claim: leave it out and set a new output_dir")
    if deployment.type != "kubernetes" and (config.clean or not on_one_node):
        with lock_output_dir(config.output_dir, *CKPT_PARTS):
            prepare_output_dir(config)
            if not on_one_node:
                write_configs(config)
    return deploy(layout, configs, deployment, config.output_dir)


def preview(config: RLConfig) -> str | None:
    """The files of a deployment, for --dry-run."""
    if config.deployment.type == "local":
        return None
    from prime_rl.deployment.launch import build_files, show_files
    from prime_rl.launcher.cluster_layout import plan_cluster

    layout, configs = plan_cluster(config)
    return show_files(build_files(layout, configs, config.deployment, config.output_dir))


def show_contexts(config: RLConfig) -> int:
    """Run the orchestrator only to print prompts with their contexts; returns its exit code."""
    import subprocess
    import tempfile

    from prime_rl.utils.pydantic_config import write_config

    with tempfile.TemporaryDirectory(prefix="prime-rl-") as directory:
        path = Path(directory) / "orchestrator.toml"
        write_config(config.orchestrator, path)
        return subprocess.run([sys.executable, "-m", "prime_rl.orchestrator.orchestrator", "@", str(path)]).returncode


def explain(config: RLConfig) -> list[str]:
    """Header of --dry-run: GPU assignment, implementation of the model, and the loss weights of a distillation."""
    from prime_rl.config_teacher import describe_taus

    has_teacher = config.orchestrator.teacher_model is not None
    return [
        *explain_assignment(config),
        *explain_impl(config),
        *([describe_taus(config.trainer.loss)] if has_teacher else []),
    ]


def explain_impl(config: RLConfig) -> list[str]:
    """The implementation of a model that is on this machine; nothing for others, which are not downloaded for this."""
    from prime_rl.runtime.tokenizer import find_local_model
    from prime_rl.trainer.models.decoder_config import choose_impl

    directory = find_local_model(config.model.name)
    if directory is None:
        return []
    if choose_impl(config.trainer.model.impl, directory) == "custom":
        return ["model: the native decoder"]
    return ["model: transformers' code, slower than the native decoder"]


def main() -> None:
    """Console script `rl`."""
    if sys.argv[1:2] == ["init"]:
        from prime_rl.launcher.new_environment import init

        exit_with_errors(lambda: init(sys.argv[2:]))
    run_command(
        "rl",
        "prime_rl.config:RLConfig",
        rl,
        summary="Train a model by asynchronous RL: starts inference server, orchestrator and trainer together.\n"
        "`rl init NAME` writes a new environment with its configuration and test.",
        explain=explain,
        preview=preview,
        writes=lambda config: config.deployment.type != "kubernetes",  # the output of pods is on another volume
    )


if __name__ == "__main__":
    main()
