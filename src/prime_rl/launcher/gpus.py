"""Assignment of this machine's GPUs and cores to the processes of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl.runtime.core_lease import DIRECTORY_VARIABLE
from prime_rl.runtime.machine import find_gpus, num_cores

if TYPE_CHECKING:
    from prime_rl.config import RLConfig
    from prime_rl.inference.config import InferenceConfig


@dataclass(frozen=True)
class GpuAssignment:
    """GPU ids of the computing processes; None: the CPU, or no such process."""

    trainer: tuple[int, ...] | None
    inference: tuple[int, ...] | None
    teacher: tuple[int, ...] | None = None

    def is_shared(self, ids: Sequence[int] | None) -> bool:
        """Whether a process with these GPUs shares one of them with another process."""
        used = [gpu for own in (self.trainer, self.inference, self.teacher) for gpu in own or ()]
        return any(used.count(gpu) > 1 for gpu in ids or ())


def assign_gpus(config: RLConfig) -> GpuAssignment:
    """The configured GPU ids; default: the first GPUs for inference, the next for training, one shared GPU, or the CPU.

    A teacher server gets the remaining GPUs, or shares those of inference. GPU ids are ignored, with a note, if the
    devices are set to the CPU. `ValueError` for ids of GPUs that are not visible: a process would run on the CPU. Where
    a single GPU is visible, one id is that GPU, with a warning.
    """
    from loguru import logger

    from prime_rl.config import given_gpus

    if is_on_cpu(config):
        return GpuAssignment(None, None)
    visible = find_gpus()
    for key, ids in given_gpus(config).items():
        if not visible:
            raise ValueError(f"{key} is set but this machine has no visible NVIDIA GPU: leave it out to run on the CPU")
        missing = [gpu for gpu in ids if gpu not in visible]
        if missing and len(visible) == len(ids) == 1:
            logger.warning(f"{key} = {ids}: GPU {missing[0]} is not visible here, sharing GPU {visible[0]}")
            config = config.model_copy(update={key: visible})
        elif missing:
            raise ValueError(f"{key} = {ids}: GPU {missing[0]} is not visible here, give ids of {visible}")
    return assign_visible_gpus(config, visible)


def is_on_cpu(config: RLConfig) -> bool:
    """Whether the device of every computing process is set to the CPU."""
    devices = [config.trainer.model.device]
    devices += [server.model.device for server in (config.inference, config.teacher_inference) if server is not None]
    return all(device == "cpu" for device in devices)


def assign_visible_gpus(config: RLConfig, visible: Sequence[int]) -> GpuAssignment:
    """Assign the visible GPUs to the processes."""
    num_serving = check_serving_gpus(config.inference, config.inference_gpu_ids, "inference")
    num_teacher = check_serving_gpus(config.teacher_inference, config.teacher_gpu_ids, "teacher")
    if not visible:
        return GpuAssignment(None, None)
    serving: tuple[int, ...] = ()
    if config.inference is not None:
        taken = {*(config.trainer_gpu_ids or ()), *(config.teacher_gpu_ids or ())}
        serving = tuple(config.inference_gpu_ids or sorted(visible, key=taken.__contains__)[:num_serving])
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
    if config.weight_broadcast.type == "nccl" and training[0] in serving:
        raise ValueError(
            f'weight_broadcast.type = "nccl" between processes that share GPU {training[0]}, which NCCL refuses: use '
            '"filesystem" or "gloo"'
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
        section = "inference.parallel" if name == "inference" else "teacher_inference.parallel"
        raise ValueError(
            f"{name}_gpu_ids = {list(ids)}: an engine with {section}.tp * {section}.dp = {num_gpus} uses "
            f"{'one GPU, give one id' if num_gpus == 1 else f'{num_gpus} GPUs, give as many ids'}, or change {section}"
        )
    return num_gpus


def count_trainer_ranks(config: RLConfig, assignment: GpuAssignment) -> int:
    """One rank per GPU of the trainer; on the CPU the number of ranks of `trainer.parallel`."""
    return len(assignment.trainer) if assignment.trainer is not None else config.trainer.parallel.num_ranks


def compute_environment(gpu_ids: Sequence[int] | None, num_compute: int, leases: Path | None = None) -> dict[str, str]:
    """Environment variables that assign GPUs, or a share of the cores: oversubscribed threads are far slower.

    Without OMP_NUM_THREADS, the share may grow by the cores of processes that wait (`leases`, see `core_lease`).
    """
    if gpu_ids is not None:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpu_ids))}
    if threads := os.environ.get("OMP_NUM_THREADS"):
        return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": threads}
    shared = {} if leases is None else {DIRECTORY_VARIABLE: str(leases)}
    return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(max(1, num_cores() // num_compute)), **shared}


def describe_assignment(assignment: GpuAssignment) -> str:
    """One line that describes the devices of the processes."""
    if assignment.trainer is None:
        cores = num_cores()
        return f"all processes on the CPU ({cores} core{'s' if cores > 1 else ''})"
    where = "elsewhere" if assignment.inference is None else f"on GPU {assignment.inference}"
    text = f"trainer on GPU {assignment.trainer}, inference {where}"
    return text if assignment.teacher is None else f"{text}, teacher on GPU {assignment.teacher}"


def explain_assignment(config: RLConfig) -> list[str]:
    """One line per process with its GPUs, as if the configured ones were visible."""
    from prime_rl.config import given_gpus

    given = [gpu for ids in given_gpus(config).values() for gpu in ids]
    on_cpu = is_on_cpu(config)
    assignment = GpuAssignment(None, None) if on_cpu else assign_visible_gpus(config, sorted({*given, *find_gpus()}))
    if assignment.trainer is None:
        return [describe_assignment(assignment)]
    rows = {"inference": assignment.inference, "teacher": assignment.teacher, "trainer": assignment.trainer}
    return [f"{name:<9} GPU {','.join(map(str, gpus))}" for name, gpus in rows.items() if gpus is not None]
