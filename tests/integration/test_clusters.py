"""Multi-node runs: real Slurm and Ray, hosts that lose their network, Kubernetes schemas.

All of them are slow and skip where root, Debian's slurm-wlm, `ray`, `kubernetes-validate` or kubectl is missing.
`make test-all` brings what can be installed; `make test-peers` does so for these tests and the loss oracles alone.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hosts
import pytest
import slurm_cluster
from cli_runner import PYTHON_PATH, ROOT

from prime_rl.runtime.machine import find_free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
WITHOUT_HOSTS = hosts.why_not()
WITHOUT_SLURM = WITHOUT_HOSTS or slurm_cluster.why_not()
needs_hosts = pytest.mark.skipif(WITHOUT_HOSTS is not None, reason=str(WITHOUT_HOSTS))
needs_slurm = pytest.mark.skipif(WITHOUT_SLURM is not None, reason=str(WITHOUT_SLURM))
LETTERS = ROOT / "tests" / "integration" / "letters.toml"
NODES = ["--deployment.num-train-nodes", "2", "--deployment.num-infer-nodes", "1", "--deployment.gpus-per-node", "0"]
NODES += ["--trainer.parallel.dp", "2"]
ON_BRIDGE = ["--deployment.env", json.dumps({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": hosts.INTERFACE})]


def submit(
    out: Path, kind: str, *argv: str, env: dict[str, str], module: str = "prime_rl.rl", timeout_s: float = 600
) -> str:
    """Submit a run; returns the output of `rl` or `sft`."""
    config = LETTERS if module == "prime_rl.rl" else ROOT / "configs" / "debug" / "sft" / "train.toml"
    command = [sys.executable, "-m", module, "@", str(config), "--output-dir", str(out), *argv]
    done = subprocess.run([*command, "--deployment.type", kind], env=env, capture_output=True, text=True,
                          timeout=timeout_s)  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout + show_logs(out)
    return done.stdout


def show_logs(out: Path) -> str:
    return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in sorted((out / "logs").glob("*")))


def variables() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PYTHON_PATH}


def check_run(out: Path, steps: int = 4, in_turn: bool = True) -> None:
    """The run is whole: the last weights, and metrics of both ends; in strict turn, no difference in log-probs."""
    assert (out / "weights" / f"step_{steps}" / "STABLE").is_file(), show_logs(out)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for process in ("trainer", "orchestrator"):
        assert max(row["step"] for row in rows if row.get("process") == process) == steps
    mismatch = [row["mismatch_kl/mean"] for row in rows if "mismatch_kl/mean" in row]
    assert mismatch and (max(mismatch) == 0 or not in_turn), "two ranks and an engine on three hosts agree to the bit"


def wait_until(ready: Callable[[], bool], what: str, timeout_s: float = 600) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.5)


def run_slurm_job(tmp_path: Path, num_hosts: int, *argv: str, module: str = "prime_rl.rl") -> Path:
    """A job on a Slurm of that many hosts, to its good end; returns the run's directory."""
    out = tmp_path / "run"
    with hosts.open_hosts(num_hosts) as machines, slurm_cluster.open_slurm(machines, tmp_path / "slurm") as found:
        env = {**variables(), "SLURM_CONF": found["SLURM_CONF"]}
        assert "Slurm job 1" in submit(out, "slurm", *argv, *ON_BRIDGE, env=env, module=module)

        def state() -> str:
            return subprocess.run(["scontrol", "show", "job", "1"], env=env, capture_output=True, text=True).stdout

        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        wait_until(lambda: any(f"JobState={end}" in state() for end in ends), "the job")
        assert "JobState=COMPLETED" in state(), show_logs(out)
    assert "Run finished" in (out / "logs" / "job-1.log").read_text()
    return out


@needs_slurm
def test_slurm_runs_the_batch_script_over_three_machines(tmp_path: Path) -> None:
    check_run(run_slurm_job(tmp_path, 3, *NODES))


@needs_slurm
def test_slurm_runs_sft_over_two_machines(tmp_path: Path) -> None:
    nodes = [*NODES[:2], "--deployment.gpus-per-node", "0", "--parallel.dp", "2"]
    out = run_slurm_job(tmp_path, 2, *nodes, module="prime_rl.trainer.sft.train")
    assert (out / "weights" / "step_5" / "STABLE").is_file(), show_logs(out)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss/mean" in row] == [1, 2, 3, 4, 5]


@needs_slurm
def test_slurm_gives_a_teacher_machines_of_its_own(tmp_path: Path) -> None:
    """Trainer, student's server and teacher's server on a host each; weights over process groups."""
    nodes = ["--deployment.num-train-nodes", "1", *NODES[2:6], "--deployment.num-teacher-nodes", "1"]
    teacher = ["--orchestrator.teacher-model.context", "Hint: use early letters. ", "--weight-broadcast.type", "gloo"]
    out = run_slurm_job(tmp_path, 3, *nodes, *teacher)
    check_run(out)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    distances = [row["teacher_kl/mean"] for row in rows if "teacher_kl/mean" in row]
    assert len(distances) == 4 and all(distance != 0 for distance in distances)
    assert (out / "logs" / "teacher_inference_0-0.log").is_file() and (out / "broadcasts").is_dir()


@needs_slurm
def test_a_task_that_cannot_start_fails_the_slurm_job(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with hosts.open_hosts(3) as machines, slurm_cluster.open_slurm(machines, tmp_path / "slurm") as found:
        env = {**variables(), "SLURM_CONF": found["SLURM_CONF"]}
        submit(out, "slurm", *NODES, *ON_BRIDGE, "--orchestrator.env", '[{"id": "letters:missing"}]', env=env)
        log = out / "logs" / "job-1.log"
        wait_until(lambda: log.is_file() and "the job stops" in log.read_text(), "the end of the job")
    assert "orchestrator ended with code 2" in log.read_text()


def test_ray_runs_the_plan_over_three_raylets(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed; cure: make test-peers")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 10**8})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=10**8)
        output = submit(tmp_path, "ray", *NODES, *ON_BRIDGE[:1], '{"OMP_NUM_THREADS": "1"}',
                      "--deployment.address", cluster.address, env=variables())  # fmt: skip
    finally:
        cluster.shutdown()
    assert "Run finished" in output
    check_run(tmp_path)


def test_a_job_is_handed_in_to_the_head_of_a_ray_cluster(tmp_path: Path) -> None:
    """`ray job submit` over HTTP: the driver runs on the cluster, and `rl` has ended long before the run has."""
    ray = pytest.importorskip("ray", reason="ray is not installed; cure: make test-peers")
    pytest.importorskip("aiohttp_cors", reason="ray[default] is not installed; cure: make test-peers")
    from ray.cluster_utils import Cluster
    from ray.job_submission import JobSubmissionClient

    port, cpus = find_free_port(), {"num_cpus": 2, "object_store_memory": 10**8}
    head = {**cpus, "include_dashboard": True, "dashboard_port": port}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(**cpus)
        address = f"http://127.0.0.1:{port}"
        output = submit(tmp_path, "ray", *NODES, *ON_BRIDGE[:1], '{"OMP_NUM_THREADS": "1"}',
                      "--deployment.address", address, env=variables())  # fmt: skip
        job = re.search(r"Ray job (raysubmit_\w+)", output)
        assert job is not None, output
        client = JobSubmissionClient(address)
        wait_until(lambda: client.get_job_status(job[1]).is_terminal(), "the job")
        log = client.get_job_logs(job[1])
        assert client.get_job_status(job[1]) == "SUCCEEDED", log + show_logs(tmp_path)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert "Run finished" in log
    check_run(tmp_path)


@pytest.mark.parametrize("built", [False, True], ids=["file", "kustomize"])
def test_manifests_are_valid(built: bool, tmp_path: Path) -> None:
    missing = "kubernetes-validate is not installed; cure: make test-peers"
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason=missing)
    yaml = pytest.importorskip("yaml")
    if built and shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed; cure: apt-get install kubernetes-client")
    from prime_rl.config import RLConfig
    from prime_rl.deployment.launch import build_files, write_files
    from prime_rl.launcher.cluster_layout import plan_cluster
    from prime_rl.utils.pydantic_config import parse_argv

    argv = ["--deployment.type", "kubernetes", "--deployment.image", "repo/prime:1", "--deployment.claim", "shared"]
    teacher = ["--deployment.num-teacher-nodes", "1", "--orchestrator.teacher-model.context", "Hint. "]
    teacher += ["--orchestrator.teacher-model.model.name", "other"]
    for more in ([], ["--deployment.num-infer-nodes", "3"], ["--deployment.num-infer-nodes", "3", *teacher]):
        config, _ = parse_argv(RLConfig, [*argv, *more], "rl", {})
        assert config.deployment.type != "local"
        write_files(build_files(*plan_cluster(config), config.deployment, Path("outputs"), "key"), tmp_path)
        text = (tmp_path / "run.yaml").read_text()
        if built:
            command = ["kubectl", "kustomize", str(tmp_path)]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for item in yaml.safe_load_all(text):
            for version in ("1.27", "1.31"):
                kubernetes_validate.validate(item, version, strict=True)


@needs_hosts
@pytest.mark.parametrize(
    ("cut", "way"), [("inference", "filesystem"), ("trainer", "filesystem"), ("inference", "gloo")]
)
def test_disconnected_host_returns_without_loss(cut: str, way: str, tmp_path: Path) -> None:
    """Trainer ranks on hosts 0 and 1, the server on 2, the orchestrator on 3; the cut lasts some seconds of a run."""
    out, place = tmp_path / "run", 2 if cut == "inference" else 1
    lay_out_files(out, *NODES, *ON_BRIDGE, "--max-steps", "6", "--weight-broadcast.type", way)
    where = {"trainer": [0, 1], "inference_0": [2], "orchestrator": [3]}
    hidden = [out / "weights", out / "broadcasts"] if way == "gloo" else []
    with hosts.open_hosts(4) as machines, running(out, machines, where, hidden) as tasks:
        wait_until(lambda: count_steps(out) >= 2, "step 2", 300)
        machines.cut(place)
        before = count_steps(out)
        time.sleep(12)
        during = count_steps(out)
        machines.join(place)
        assert during <= before + 1, "without this host nothing goes on"
        for task in (("trainer", 0), ("trainer", 1), ("orchestrator", 0)):
            assert tasks[task].wait(300) == 0, show_logs(out)
    check_run(out, 6)


@needs_hosts
@pytest.mark.parametrize("way", ["filesystem", "gloo"])
def test_a_server_leaves_and_joins_during_a_run(way: str, tmp_path: Path) -> None:
    """Two servers, one is needed: the host of the other is cut off until three more versions are out. Over process
    groups the servers see nothing of the trainer's versions on disk."""
    out = tmp_path / "run"
    more = ["--orchestrator.min-servers", "1", "--max-async-level", "1", "--max-steps", "40"]
    more += ["--weight-broadcast.type", way, "--weight-broadcast.timeout", "5"]
    lay_out_files(out, "--deployment.num-infer-nodes", "2", *NODES[4:6], *ON_BRIDGE, *more)
    where = {"trainer": [0], "orchestrator": [0], "inference_0": [1], "inference_1": [2]}
    log = out / "logs" / "orchestrator.log"
    hidden = [out / "weights", out / "broadcasts"] if way == "gloo" else []
    with hosts.open_hosts(3) as machines, running(out, machines, where, hidden) as tasks:
        wait_until(lambda: count_steps(out) >= 2, "step 2", 300)
        machines.cut(2)
        wait_until(lambda: "continuing without it" in log.read_text(), "notice of the absence", 120)
        left = count_steps(out)
        wait_until(lambda: count_steps(out) >= left + 3, "three steps with one server", 120)
        machines.join(2)
        wait_until(lambda: "recovered: serves version" in log.read_text(), "the return", 120)
        for task in (("trainer", 0), ("orchestrator", 0)):
            assert tasks[task].wait(300) == 0, show_logs(out)
    check_run(out, 40, in_turn=False)


def count_steps(out: Path) -> int:
    """The newest version that was published; 0 before the first."""
    found = [*(out / "weights").glob("step_*"), *(out / "broadcasts").glob("step_*")]
    return max((int(path.name[5:]) for path in found), default=0)


@contextmanager
def running(
    out: Path, machines: hosts.Hosts, where: dict[str, list[int]], hidden: Sequence[Path] = ()
) -> Iterator[dict[tuple[str, int], subprocess.Popen[bytes]]]:
    """Every task's script on its hosts, as a cluster starts it; `HOST_i` of the layout is host `i`.

    Servers find nothing in the directories that are `hidden` from them.
    """
    for path in hidden:
        path.mkdir(parents=True)
    blind = "".join(f"mount -t tmpfs none {shlex.quote(str(path))} && " for path in hidden)
    env = {**variables(), "RL_FLEET_KEY": "secret"}
    env |= {f"HOST_{i}": address for i, address in enumerate(machines.addresses)}
    tasks = {}
    try:
        for name, places in where.items():
            for rank, place in enumerate(places):
                argv = machines.wrap(place, ["bash", str(out / "deployment" / f"{name}.sh")])
                if hidden and name.startswith("inference"):
                    argv = ["unshare", "--mount", "bash", "-c", f"{blind}exec {shlex.join(argv)}"]
                with (out / "logs" / f"{name}-{rank}.log").open("wb") as log:
                    variables_here = {**env, "NODE_RANK": str(rank)}
                    tasks[name, rank] = subprocess.Popen(argv, env=variables_here, stdout=log, stderr=log, cwd=ROOT)
        yield tasks
    finally:
        for process in tasks.values():
            process.kill()


def lay_out_files(out: Path, *argv: str) -> None:
    """The scripts and configurations that a cluster would start."""
    from prime_rl.config import RLConfig
    from prime_rl.deployment.launch import build_files, write_files
    from prime_rl.launcher.cluster_layout import plan_cluster
    from prime_rl.utils.pydantic_config import parse_argv

    words = ["@", str(LETTERS), "--output-dir", str(out), "--deployment.type", "slurm", *argv]
    config, _ = parse_argv(RLConfig, words, "rl", {})
    assert config.deployment.type != "local"
    write_files(build_files(*plan_cluster(config), config.deployment, out), out / "deployment")
    (out / "logs").mkdir()
