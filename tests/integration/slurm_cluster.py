"""A local Slurm cluster: a controller, and a slurmd on every host of `hosts`. Needs slurm-wlm (Debian) and root."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hosts import Hosts

CONFIG = """
ClusterName=tiny
SlurmctldHost={controller}({gateway})
AuthType=auth/munge
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def why_not() -> str | None:
    """What is missing; None: nothing."""
    missing = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(name) is None]
    return f"{', '.join(missing)} not installed; cure: apt-get install slurm-wlm munge" if missing else None


@contextmanager
def open_slurm(hosts: Hosts, root: Path) -> Iterator[dict[str, str]]:
    """The cluster, until the body ends; gives the variables by which Slurm's commands find it."""
    nodes = "\n".join(
        f"NodeName=n{i} NodeHostname={socket.gethostname()} NodeAddr={address} CPUs={os.cpu_count()}"
        for i, address in enumerate(hosts.addresses)
    )
    config = CONFIG.format(controller=socket.gethostname(), gateway=hosts.gateway, root=root, nodes=nodes)
    (root / "state").mkdir(parents=True)
    (root / "slurm.conf").write_text(config)
    env = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
    munge = root / "munge.socket"
    (root / "slurm.conf").write_text(f"{config}AuthInfo=socket={munge}\n")
    key = root / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    commands = [
        ["munged", "--foreground", f"--socket={munge}", f"--key-file={key}", f"--pid-file={root / 'munged.pid'}",
         f"--log-file={root / 'munged.log'}", f"--seed-file={root / 'munged.seed'}", "--force"],
        ["slurmctld", "-D"],
        *(hosts.wrap(i, ["slurmd", "-D", "-N", f"n{i}"]) for i in range(len(hosts.names))),
    ]  # fmt: skip
    running = []
    try:
        for number, command in enumerate(commands):
            log = (root / f"daemon-{number}.log").open("wb")
            running.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
            log.close()
            time.sleep(1 if number < 2 else 0)
        _wait_idle(env, len(hosts.names))
        yield env
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_idle(env: dict[str, str], number: int, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        reported = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], env=env, capture_output=True, text=True)
        if reported.stdout.split() == ["idle"] * number:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the nodes are not idle: {reported.stdout} {reported.stderr}")
        time.sleep(1)
