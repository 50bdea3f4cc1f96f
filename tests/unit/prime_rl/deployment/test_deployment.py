"""Files of a deployment: our parser accepts every command, and addresses agree on both ends.

Clusters that run them are in tests/integration/test_clusters.py.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_rl.config import RLConfig
from prime_rl.deployment import kubernetes, ray, ray_job, slurm
from prime_rl.deployment.config import LocalDeployment, NodesConfig
from prime_rl.deployment.launch import build_files, deploy, show_files, write_files
from prime_rl.deployment.layout import KEY_VARIABLE, Layout, Task, build_scripts, run_tool
from prime_rl.deployment.ray_job import Host, RayPlan, RayTask, read_plan, supervise
from prime_rl.inference.config import InferenceConfig
from prime_rl.launcher import cluster_layout
from prime_rl.launcher.output_dir import prepare_output_dir
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.rl import rl
from prime_rl.runtime.run_dir import RunDir
from prime_rl.trainer.config import SKIPS, SFTConfig, TrainConfig
from prime_rl.trainer.sft.deployment import build_layout as lay_out_sft
from prime_rl.utils.pydantic_config import BaseConfig, parse_argv
from rollouts.training.steps import complete_steps, publish_step

KINDS: dict[str, list[str]] = {
    "slurm": ["--deployment.partition", "gpu nodes", "--deployment.options", '{"account": "a b"}'],
    "ray": ["--deployment.address", "10.0.0.1:6379"],
    "kubernetes": ["--deployment.image", "repo/prime:1", "--deployment.claim", "shared"],
}
READERS: dict[str, type[BaseConfig]] = {
    "prime_rl.trainer.rl.train": TrainConfig,
    "prime_rl.trainer.sft.train": SFTConfig,
    "prime_rl.orchestrator.orchestrator": OrchestratorConfig,
    "prime_rl.inference.server": InferenceConfig,
    "prime_rl.rl": RLConfig,
}
MODEL = ["--model.name", "tiny-qwen3"]
WIDE = ["--deployment.num-train-nodes", "2", "--deployment.num-infer-nodes", "2", "--deployment.gpus-per-node", "4"]
SGLANG = ["--inference.backend", "sglang", "--inference.sglang.base-url"]
TEACHER = ["--orchestrator.teacher-model.context", "Hint. ", "--orchestrator.teacher-model.model.name", "other"]


def parse(kind: str, *argv: str, model: type[BaseConfig] = RLConfig) -> Any:
    return parse_argv(model, [*MODEL, "--deployment.type", kind, *KINDS.get(kind, []), *argv], "rl", {})[0]


@cache
def make(kind: str, *argv: str) -> tuple[Layout, dict[str, str]]:
    config = parse(kind, *argv)
    layout, configs = cluster_layout.plan_cluster(config)
    return layout, build_files(layout, configs, config.deployment, Path("outputs"))


def addresses(layout: Layout) -> dict[str, str]:
    return {f"HOST_{i}": f"10.0.0.{i}" for i in range(len(layout.places))} | {"NODE_RANK": "1"}


def read_words(texts: Sequence[str], hosts: dict[str, str], directory: Path) -> list[list[str]]:
    """The words of each script's command as the shell makes them."""
    for i, text in enumerate(texts):
        (directory / f"{i}.sh").write_text(re.sub(r"^exec ", "printf '%s\\\\0' ", text, flags=re.MULTILINE))
    loop = f'for i in {{0..{len(texts) - 1}}}; do bash "$0/$i.sh"; printf "\\1"; done'
    done = subprocess.run(["bash", "-c", loop, str(directory)], env=hosts, capture_output=True, text=True, check=True)
    return [part.split("\0")[:-1] for part in done.stdout.split("\1")[:-1]]


def read_commands(
    layout: Layout, files: dict[str, str], directory: Path
) -> dict[str, tuple[dict[str, str], BaseConfig]]:
    """Task -> torchrun's options, and the configuration that our parser makes of the command."""
    for name, text in files.items():
        if name.endswith(".toml"):
            (directory / name).write_text(text)
    scripts = [files[f"{task.name}.sh"] for task in layout.tasks]
    commands = {}
    for task, words in zip(layout.tasks, read_words(scripts, addresses(layout), directory), strict=True):
        at = words.index(task.module)
        assert words[1] == words[at - 1] == "-m" and words[at + 1] == "@"
        options = dict(word[2:].split("=") for word in words[2:at] if word.startswith("--"))
        commands[task.name] = options, parse_argv(READERS[task.module], words[at + 1 :], task.name, {})[0]
    return commands


@pytest.mark.parametrize("more", [[], TEACHER])
@pytest.mark.parametrize("kind", KINDS)
def test_every_command_is_read_by_our_parser_and_both_ends_agree(kind: str, more: list[str], tmp_path: Path) -> None:
    teacher = ["--deployment.num-teacher-nodes", "1"] if more else []
    argv = ["--inference.parallel.tp", "2", "--deployment.env", '{"A": "x y$z"}']
    argv += ["--transport.type", "zmq", "--weight-broadcast.type", "gloo"]
    layout, files = make(kind, *WIDE, *more, *teacher, *argv)
    commands = read_commands(layout, files, tmp_path)
    hosts = addresses(layout)
    torchrun, trainer = commands["trainer"]
    assert torchrun["nnodes"] == "2" and torchrun["nproc-per-node"] == "4" and torchrun["node-rank"] == "1"
    assert torchrun["master-addr"] == hosts["HOST_0"]
    _, orchestrator = commands["orchestrator"]
    assert isinstance(trainer, TrainConfig) and isinstance(orchestrator, OrchestratorConfig)
    where = next(task.places[0] for task in layout.tasks if task.name == "orchestrator")
    assert trainer.transport.host == orchestrator.transport.host == hosts[f"HOST_{where}"]
    assert trainer.output_dir == orchestrator.output_dir and trainer.transport.type == "zmq"
    assert trainer.weight_broadcast.host == hosts["HOST_0"] and orchestrator.weight_broadcast.type == "gloo"
    listening: dict[str, list[str]] = {"inference": [], "teacher_inference": []}
    for task in layout.tasks:
        if task.module != "prime_rl.inference.server":
            continue
        _, server = commands[task.name]
        assert isinstance(server, InferenceConfig)
        assert server.weight_broadcast.type == "gloo"
        assert server.server.host == "0.0.0.0" and server.server.api_key_var == KEY_VARIABLE
        kind_of = "teacher_inference" if "teacher" in task.name else "inference"
        assert server.server.wait_for_weights == (kind_of == "inference")
        listening[kind_of].append(f"http://{hosts[f'HOST_{task.places[0]}']}:{server.server.port}/v1")
        assert layout.places[task.places[0]].num_gpus >= max(task.gpus or ()) + 1
    assert orchestrator.client.base_url == listening["inference"] and len(listening["inference"]) == 4
    assert orchestrator.client.api_key_var == KEY_VARIABLE
    if more:
        assert orchestrator.teacher_model is not None
        assert orchestrator.teacher_model.client.base_url == listening["teacher_inference"]
        assert len(listening["teacher_inference"]) == 4
    assert all("export A='x y$z'" in files[f"{task.name}.sh"] for task in layout.tasks)


def test_tasks_on_a_node_share_no_gpu_or_port() -> None:
    for kind in KINDS:
        layout, _ = make(kind, *WIDE, *TEACHER, "--deployment.num-teacher-nodes", "2")
        for place in range(len(layout.places)):
            tasks = [task for task in layout.tasks if place in task.places]
            gpus = [gpu for task in tasks for gpu in task.gpus or ()]
            ports = [task.port for task in tasks if task.port]
            assert len(set(gpus)) == len(gpus) and len(set(ports)) == len(ports)
            assert set(gpus) <= set(range(layout.places[place].num_gpus))
    ports = [task.port for task in layout.tasks if task.port]
    assert len(set(ports)) == len(ports), "also where all places have one address"


def test_one_copy_of_the_weights_teaches_too(tmp_path: Path) -> None:
    argv = ["--orchestrator.teacher-model.context", "Hint. ", "--orchestrator.teacher-model.weights", "live"]
    layout, files = make("slurm", *WIDE, *argv)
    _, orchestrator = read_commands(layout, files, tmp_path)["orchestrator"]
    assert isinstance(orchestrator, OrchestratorConfig) and orchestrator.teacher_model is not None
    assert orchestrator.teacher_model.client.base_url == orchestrator.client.base_url
    assert len(orchestrator.client.base_url) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_one_machine_runs_rl_whole_with_its_gpu_lists(kind: str, tmp_path: Path) -> None:
    layout, files = make(kind, "--inference-gpu-ids", "0,1", "--inference.parallel.dp", "2", "--trainer-gpu-ids", "2,3")
    (task,) = layout.tasks
    _, config = read_commands(layout, files, tmp_path)["rl"]
    assert isinstance(config, RLConfig) and isinstance(config.deployment, LocalDeployment)
    assert config.trainer_gpu_ids == [2, 3] and task.is_work and len(layout.places) == 1
    assert "CUDA_VISIBLE_DEVICES" not in files["rl.sh"]


@pytest.mark.parametrize("model", [RLConfig, SFTConfig])
def test_a_job_shortens_the_schedule_once(model: type[BaseConfig], tmp_path: Path) -> None:
    section = "trainer." if model is RLConfig else ""
    argv = [f"--{section}scheduler.type=linear", f"--{section}scheduler.warmup-steps=100", "--max-steps=20"]
    config = parse("slurm", *argv, model=model)
    layout, configs = (cluster_layout.plan_cluster if model is RLConfig else lay_out_sft)(config)
    files = build_files(layout, configs, config.deployment, Path("outputs"))
    ((_, read),) = read_commands(layout, files, tmp_path).values()
    submitted, started = (part.trainer if isinstance(part, RLConfig) else part for part in (config, read))
    assert isinstance(submitted, TrainConfig | SFTConfig) and isinstance(started, TrainConfig | SFTConfig)
    assert dict(submitted.scheduler)["warmup_steps"] == 18 and started.scheduler == submitted.scheduler


def test_clean_is_refused_where_it_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kubernetes, "submit", lambda *_: "applied")
    with pytest.raises(ValueError, match=r"clean .*deployment\.claim: .*output_dir"):
        rl(parse("kubernetes", *WIDE, "--clean"))
    assert not list(tmp_path.iterdir())
    assert rl(parse("kubernetes", "--clean")) == 0, "the only pod removes the steps itself"
    assert "clean = true" in Path("outputs/deployment/rl.toml").read_text()


def test_a_job_queued_again_keeps_its_steps_with_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "submit", lambda _: "17")
    out = tmp_path / "run"
    publish_step(out / "weights", 1, lambda directory: None)
    assert rl(parse("slurm", "--output-dir", str(out), "--clean")) == 0
    assert not complete_steps(out / "weights")
    on_node = parse_argv(RLConfig, ["@", str(out / "deployment" / "rl.toml")], "rl", {})[0]
    publish_step(out / "weights", 2, lambda directory: None)
    with pytest.raises(ValueError, match="earlier run"):
        prepare_output_dir(on_node)
    assert complete_steps(out / "weights") == [2]


STAGE = ["--ckpt.resume-step", "4", "--ckpt.skip-progress", "true"]
SKIP = ["--ckpt.resume-step", "4", "--trainer.ckpt.skip-optimizer", "true"]


@pytest.mark.parametrize(("model", "argv"), [(SFTConfig, STAGE), (RLConfig, SKIP), (RLConfig, [*WIDE, *SKIP])])
def test_a_job_queued_again_continues(model: type[BaseConfig], argv: list[str], tmp_path: Path) -> None:
    config, run = parse("slurm", *argv, model=model), RunDir(tmp_path)
    run.begin_attempt("trainer", 0)
    run.begin_attempt("sft", 0)
    layout, configs = (cluster_layout.plan_cluster if model is RLConfig else lay_out_sft)(config)
    files = build_files(layout, configs, config.deployment, run.root)
    run.deployment.mkdir()
    for start, is_first in enumerate((True, True, False)):
        read = [part for _, part in read_commands(layout, files, run.deployment).values()]
        trainers = [part.trainer if isinstance(part, RLConfig) else part for part in read]
        ckpts = [part.ckpt for part in trainers if isinstance(part, TrainConfig | SFTConfig | OrchestratorConfig)]
        assert [ckpt and ckpt.resume_step for ckpt in ckpts] == [4 if is_first else -1] * len(ckpts)
        skips = [any(dict(ckpt or {}).get(name) for name in SKIPS) for ckpt in ckpts]
        assert any(skips) == is_first
        if start:  # at the first time the job was stopped before its trainer has loaded the checkpoint
            run.begin_attempt("sft" if model is SFTConfig else "trainer", 4)


@pytest.mark.parametrize("kind", KINDS)
def test_sft_is_one_task_over_all_machines(kind: str, tmp_path: Path) -> None:
    argv = ["--deployment.num-train-nodes", "3", "--deployment.gpus-per-node", "2"]
    config = parse(kind, *argv, model=SFTConfig)
    layout, configs = lay_out_sft(config)
    files = build_files(layout, configs, config.deployment, Path("outputs"))
    torchrun, read = read_commands(layout, files, tmp_path)["sft"]
    assert torchrun["nnodes"] == "3" and torchrun["nproc-per-node"] == "2"
    assert isinstance(read, SFTConfig) and isinstance(read.deployment, LocalDeployment)
    with pytest.raises(ValueError, match="sft starts no servers"):
        lay_out_sft(parse(kind, *argv, "--deployment.num-infer-nodes", "1", model=SFTConfig))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--deployment.num-train-nodes", "2"], "inference has no nodes: set deployment.num_infer_nodes"),
        ([*WIDE, "--trainer-gpu-ids", "0"], "trainer_gpu_ids applies to one machine"),
        ([*WIDE, "--inference.parallel.tp", "8"], "tp \\* dp = 8 is more than deployment.gpus_per_node = 4"),
        ([*WIDE, "--deployment.num-infer-replicas", "7"], "does not fit evenly on 2 nodes with capacity for 4"),
        ([*WIDE, "--deployment.num-infer-replicas", "10"], "does not fit evenly on 2 nodes with capacity for 4"),
        ([*WIDE, "--deployment.num-teacher-nodes", "1"], "rl starts no teacher server"),
        ([*WIDE, *TEACHER], "teacher has no nodes: set deployment.num_teacher_nodes"),
        ([*WIDE, "--trainer.parallel.tp", "3"], "does not divide 8 ranks"),
        ([*WIDE, "--trainer.parallel.dp", "3"], "parallel.dp is 3 but 8 ranks"),
        (["--deployment.num-infer-replicas", "2"], "runs rl on a single node"),
        ([*WIDE, *SGLANG, "http://10.0.0.9:30000"], "10.0.0.9:30000 is one SGLang server, but .* 2 gateways"),
        ([*WIDE, *SGLANG, "http://localhost:3", "--deployment.num-infer-replicas", "4"], "starts 4 gateways"),
        ([*WIDE[:4], "--deployment.gpus-per-node", "0", "--trainer.parallel.dp", "3"], "3 ranks are not divisible"),
    ],
)
def test_invalid_node_counts_raise(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("slurm", *argv)


def test_each_node_has_one_gateway_to_its_sglang_server() -> None:
    layout, files = make("slurm", *WIDE, *SGLANG, "http://127.0.0.1:30000")
    servers = [task for task in layout.tasks if task.module == "prime_rl.inference.server"]
    assert [(task.places, task.gpus) for task in servers] == [((2,), ()), ((3,), ())]
    assert "CUDA_VISIBLE_DEVICES=''" in files["inference_0.sh"]


def test_keys_of_another_deployment_type_are_rejected() -> None:
    with pytest.raises(ValueError, match="partition"):
        parse("ray", "--deployment.partition", "x")
    with pytest.raises(ValueError, match="claim"):
        parse_argv(RLConfig, ["--deployment.type", "kubernetes", "--deployment.image", "x"], "rl", {})


def test_output_of_pods_is_on_the_claim() -> None:
    config = parse("kubernetes", *WIDE)
    layout, configs = cluster_layout.plan_cluster(config)
    build_files(layout, configs, config.deployment, Path("/shared/run"))
    for out in ("/data/run", "/shared"):  # the files of the job would be in ./deployment
        with pytest.raises(ValueError, match=r"not below deployment\.mount_path /shared"):
            build_files(layout, configs, config.deployment, Path(out))


@pytest.mark.parametrize("module", ["prime_rl.rl", "prime_rl.trainer.sft.train"])
def test_the_claim_need_not_be_mounted_here(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "submit", lambda *_: "applied")
    monkeypatch.chdir(tmp_path)
    mount = tmp_path / "shared"
    paths = ["--deployment.mount-path", str(mount), "--output-dir", str(mount / "run")]
    monkeypatch.setattr(sys, "argv", ["x", *MODEL, "--deployment.type", "kubernetes", *KINDS["kubernetes"], *paths])
    with pytest.raises(SystemExit) as left:
        importlib.import_module(module).main()
    assert left.value.code == 0 and not mount.exists()
    assert (tmp_path / "run" / "deployment" / kubernetes.MANIFEST).exists()


def test_shell_files_are_shell() -> None:
    bash = shutil.which("bash")
    assert bash is not None
    for kind in KINDS:
        _, files = make(kind, *WIDE)
        for name, text in files.items():
            if name.endswith((".sh", ".sbatch")):
                subprocess.run([bash, "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("visible", "used"), [("4,5,6,7", "6,7"), (None, "2,3"), ("", "2,3"), ("0", "2,3"), ("a,b,c,GPU-d,e", "c,GPU-d")]
)
def test_a_task_uses_gpus_assigned_to_its_node(visible: str | None, used: str, tmp_path: Path) -> None:
    task = Task("server", "http.server", "server.toml", (0,), gpus=(2, 3))
    script = build_scripts(Layout((), (task,)), NodesConfig(), "printenv", None)["server.sh"]
    (tmp_path / "printenv").write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES"\n')
    (tmp_path / "printenv").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    shown = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == used


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, "10.0.0.7,node-b"),
        ({"NO_PROXY": "near.example"}, "near.example,10.0.0.7,node-b"),
        ({"NO_PROXY": "old.example", "no_proxy": "near.example"}, "near.example,10.0.0.7,node-b"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_no_proxy_is_between_the_machines(given: dict[str, str], used: str, tmp_path: Path) -> None:
    script = build_scripts(
        Layout((), (Task("server", "http.server", "server.toml", (0,)),)), NodesConfig(), "show", None
    )
    (tmp_path / "show").write_text('#!/bin/sh\necho "$no_proxy $NO_PROXY"\n')
    (tmp_path / "show").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOST_0": "10.0.0.7", "HOST_1": "node-b", **given}
    shown = subprocess.run(
        ["bash", "-c", script["server.sh"]], env=environ, capture_output=True, text=True, check=True
    ).stdout
    assert shown == f"{used} {used}\n"


def test_a_batch_script_names_each_task_and_its_machines() -> None:
    layout, files = make("slurm", *WIDE, "--deployment.time", "2-00:00:00")
    text = files[slurm.JOB_FILE]
    header = dict(line[len("#SBATCH --") :].split("=", 1) for line in text.splitlines() if line.startswith("#SBATCH"
                  ) and "=" in line)  # fmt: skip
    assert header["nodes"] == "4" == str(len(layout.places)) and header["gpus-per-node"] == "4"
    assert shlex.split(header["partition"]) == ["gpu nodes"] and shlex.split(header["account"]) == ["a b"]
    assert header["time"] == "2-00:00:00"
    started = {
        words[1]: words for line in text.splitlines() if (words := line.split())[:1] == ["run"] and len(words) > 2
    }
    for task in layout.tasks:
        assert started[task.name][2:-1] == [str(task.max_restarts), *map(str, task.places)]
    assert text.count("work+=($!)") == 2


@pytest.mark.parametrize(("min_servers", "code"), [("1", 0), ("None", 1)])
def test_a_batch_job_continues_without_optional_servers(min_servers: str, code: int, tmp_path: Path) -> None:
    _, files = make("slurm", *WIDE, "--max-restarts", "1", "--orchestrator.min-servers", min_servers)
    text = files[slurm.JOB_FILE]
    assert ("#SBATCH --no-kill" in text) == (code == 0)
    # The last server has no start left when the trainer ends.
    fail = f'case "${{@: -1}}" in *inference_*) echo >> {tmp_path}/failed; exit 3;; esac'
    wait = f"until [ $(wc -l < {tmp_path}/failed) -ge {2 * text.count('run inference_')} ]; do sleep 0.02; done"
    tools = {"srun": f"{fail}\n{wait}", "scontrol": "printf 'a\\nb\\nc\\nd\\n'"}
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "x"}
    assert subprocess.run(["bash", "-c", text], env=variables, capture_output=True).returncode == code


@pytest.mark.parametrize(("code", "num_starts"), [(2, 1), (3, 2)])
def test_a_batch_job_does_not_repeat_rejected_input(code: int, num_starts: int, tmp_path: Path) -> None:
    _, files = make("slurm", *WIDE, "--max-restarts", "1")
    text = files[slurm.JOB_FILE]
    starts = tmp_path / "starts"
    run = text[text.index("run() {") : text.index("work=()")]
    lines = (f"srun() {{ echo >> {starts}; return {code}; }}", "nodes=(a) optional=' server ' logs=. here=.", run)
    command = ["bash", "-c", "\n".join((*lines, "run server 1 0"))]
    assert subprocess.run(command, capture_output=True).returncode == code
    assert len(starts.read_text().splitlines()) == num_starts


def test_a_template_of_ones_own_takes_the_place_of_ours(tmp_path: Path) -> None:
    own = tmp_path / "mine.sbatch"
    own.write_text("{% for task in tasks %}{{ task.name }} {% endfor %}{{ job_name }}")
    _, files = make("slurm", *WIDE[:4], "--deployment.gpus-per-node", "0", "--trainer.parallel.dp", "2",
                    "--deployment.template", str(own))  # fmt: skip
    assert files[slurm.JOB_FILE] == "trainer orchestrator inference_0 inference_1 prime-rl"
    own.write_text("{{ unknown }}")
    with pytest.raises(ValueError, match="'unknown' is undefined"):
        make("slurm", "--deployment.template", str(own))


def test_a_ray_plan_is_read_back() -> None:
    layout, files = make("ray", *WIDE)
    path = Path("ray.json")
    assert json.loads(files[ray.PLAN_FILE])["bundles"] == [{"CPU": 1.0, "GPU": 4.0}] * 4
    with pytest.raises(ValueError, match=str(path)):
        read_plan(path)
    assert {task["name"] for task in json.loads(files[ray.PLAN_FILE])["tasks"]} == {t.name for t in layout.tasks}


def test_manifests_refer_to_each_other() -> None:
    yaml = pytest.importorskip("yaml")
    layout, files = make("kubernetes", *WIDE, *TEACHER, "--deployment.num-teacher-nodes", "1")
    objects = list(yaml.safe_load_all(files[kubernetes.MANIFEST]))
    kustomization = yaml.safe_load(files[kubernetes.KUSTOMIZATION])
    kinds = {item["metadata"]["name"]: item for item in objects}
    assert [item["kind"] for item in objects] == ["Service", "Job", "Job", "StatefulSet", "StatefulSet"]
    labels = {"app.kubernetes.io/name": "prime-rl", "app.kubernetes.io/instance": "prime-rl"}
    assert all(item["metadata"]["labels"] == labels for item in objects)  # a new start selects by them
    assert kinds["prime-rl-inference"]["spec"]["replicas"] == 8
    assert kinds["prime-rl-trainer"]["spec"]["completions"] == 2
    pods = {
        f"{name}-{index}.prime-rl"
        for name, item in kinds.items()
        for index in range(item["spec"].get("replicas") or item["spec"].get("completions") or 0)
    }
    config = parse("kubernetes", *WIDE, *TEACHER, "--deployment.num-teacher-nodes", "1").deployment
    names = kubernetes.find_addresses(layout, config)
    assert set(names.values()) == pods and len(names) == len(layout.places)
    generated = {item["name"] for key in ("configMapGenerator", "secretGenerator") for item in kustomization[key]}
    listed = [file for key in ("configMapGenerator", "secretGenerator") for item in kustomization[key]
              for file in item.get("files", []) + item.get("envs", [])]  # fmt: skip
    assert set(listed) | {kubernetes.MANIFEST, kubernetes.KUSTOMIZATION} == set(files)
    for item in objects[1:]:
        pod = item["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        sources = pod["volumes"][0]["projected"]["sources"]
        assert {next(iter(source.values()))["name"] for source in sources} <= generated
        assert container["envFrom"][0]["secretRef"]["name"] in generated
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        scripts = re.sub(r'"\$\{HOSTNAME##\*-\}"', "0", container["command"][2])
        assert scripts.removeprefix("exec bash /deployment/") in files


@pytest.mark.parametrize("kind", KINDS)
def test_files_contain_no_secret_values(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOO_TOKEN", 't0ken-"value"-12345')
    layout, configs = cluster_layout.plan_cluster(config := parse(kind, *WIDE))
    files = build_files(layout, configs, config.deployment, Path("outputs"))
    assert not any("t0ken-" in text for text in files.values())
    environment = json.dumps([{"id": "e", "args": {"login": os.environ["FOO_TOKEN"]}}])
    for option, value, name in (
        ("--deployment.env", json.dumps({"LOGIN": os.environ["FOO_TOKEN"]}), "LOGIN"),
        ("--orchestrator.env", environment, "args"),
    ):
        config = parse(kind, *WIDE, option, value)
        layout, configs = cluster_layout.plan_cluster(config)
        with pytest.raises(ValueError, match=rf"\.(sh|toml): .*{name} is the value of FOO_TOKEN") as error:
            build_files(layout, configs, config.deployment, Path("outputs"))
        assert "t0ken-" not in str(error.value)


def test_dry_run_shows_the_files_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from prime_rl import rl as module

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rl", *MODEL, "--deployment.type", "slurm", *WIDE, "--dry-run"])
    with pytest.raises(SystemExit) as left:
        module.main()
    shown = capsys.readouterr().out
    assert left.value.code == 0 and "# ----- job.sbatch -----" in shown and "# ----- inference_7.sh -----" in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "tool"), [("slurm", "sbatch"), ("kubernetes", "kubectl")])
def test_missing_submit_tool_leaves_files_and_a_hint(
    kind: str, tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"{tool} is not installed here"):
        rl(parse(kind, *WIDE, "--output-dir", "run"))
    for path in (tmp_path / "run" / "deployment").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_job_files_replace_only_those_of_the_same_name(tmp_path: Path) -> None:
    for name in ("notes.md", "key.env"):
        (tmp_path / name).write_text("old")
    write_files({"key.env": "new"}, tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"notes.md": "old", "key.env": "new"}
    assert stat.S_IMODE((tmp_path / "key.env").stat().st_mode) == 0o600


def test_submit_tool_errors_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin" / "sbatch"
    tool.parent.mkdir()
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    config = parse("slurm", *WIDE)
    tool.write_text("#!/bin/sh\necho 'Invalid partition' >&2; exit 1\n")
    tool.chmod(0o755)
    with pytest.raises(ValueError, match="sbatch rejected --hold job: Invalid partition"):
        run_tool(["sbatch", "--hold", "job"], "")
    with pytest.raises(ValueError, match=r"sbatch rejected .*Invalid partition"):
        deploy(*cluster_layout.plan_cluster(config), config.deployment, tmp_path / "run")
    tool.write_text('#!/bin/sh\ntest -f "$1" && echo Submitted batch job 17\n')
    assert deploy(*cluster_layout.plan_cluster(config), config.deployment, tmp_path / "run") == 0


@pytest.mark.parametrize(
    ("ended", "num_servers", "deleted"),
    [
        ([], 0, []),
        ([True, True], 1, ["job/prime-rl-job0", "job/prime-rl-job1", "statefulset/prime-rl-server0"]),
        ([], 1, ["statefulset/prime-rl-server0"]),
        ([True, False], 1, None),
    ],
)
def test_jobs_and_servers_of_an_earlier_start_are_replaced(
    ended: list[bool], num_servers: int, deleted: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs cannot be changed, and old servers have another key. With a Job that has not ended, nothing is changed: it
    may be a running run."""
    found = [
        {
            "kind": "Job",
            "metadata": {"name": f"prime-rl-job{i}"},
            "status": {"conditions": [{"type": "Suspended", "status": "True"}, {"type": "Failed", "status": str(end)}]},
        }
        for i, end in enumerate(ended)
    ]
    found += [{"kind": "StatefulSet", "metadata": {"name": f"prime-rl-server{i}"}} for i in range(num_servers)]
    calls = []

    def kubectl(argv: list[str], elsewhere: str) -> str:
        calls.append(argv[1:])
        return json.dumps({"items": found}) if argv[1] == "get" else "applied"

    monkeypatch.setattr(kubernetes, "run_tool", kubectl)
    config = parse("kubernetes", *WIDE).deployment
    labels = "app.kubernetes.io/name=prime-rl,app.kubernetes.io/instance=prime-rl"  # not those of another application
    look = ["get", "jobs,statefulsets", "-n", "default", "-o", "json", "-l", labels]
    if deleted is None:
        with pytest.raises(ValueError, match=r"deployment\.name = 'prime-rl' is in use, .*: prime-rl-job1\n"):
            kubernetes.submit(Path("run"), config)
        assert calls == [look]
    else:
        assert kubernetes.submit(Path("run"), config) == "applied"
        check = ["apply", "--dry-run=client", "-k", "run"]
        delete = ["delete", "-n", "default", "--cascade=foreground", *deleted]
        assert calls == [look, *([check, delete] if deleted else []), ["apply", "-k", "run"]]


def test_every_run_has_a_key_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "submit", lambda *_: "applied")
    config = parse("kubernetes", *WIDE)
    keys = set()
    for name in "ab":
        monkeypatch.chdir(tmp_path)
        deploy(*cluster_layout.plan_cluster(config), config.deployment, Path(name))
        keys.add((Path(name) / "deployment" / kubernetes.KEY_FILE).read_text())
    assert len(keys) == 2 and all(len(key) > len(KEY_VARIABLE) + 32 for key in keys)
    shown = show_files(build_files(*cluster_layout.plan_cluster(config), config.deployment, Path("a")))
    assert "generated at submission" in shown


class Direct:
    """Stands for an actor of Ray: `host.method.remote(...)` is a plain call."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def __getattr__(self, name: str) -> Any:
        call = {"address": lambda: "10.0.0.1"}.get(name) or getattr(self.host, name)
        return type("Method", (), {"remote": staticmethod(call)})


def supervise_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> int:
    monkeypatch.setattr("prime_rl.deployment.ray_job.POLL_S", 0.02)
    tasks = []
    for name, text in scripts.items():
        (tmp_path / f"{name}.sh").write_text(text)
        is_work, is_optional = name.startswith("work"), name.startswith("optional")
        tasks.append(RayTask(name, str(tmp_path / f"{name}.sh"), [0], 1, is_work, is_optional))
    plan = RayPlan("auto", 1, [{"CPU": 1}], str(tmp_path), str(tmp_path), {"GIVEN": "1"}, tasks)
    host = Host()
    try:
        return supervise(plan, [Direct(host)], lambda value: value, ConnectionError)
    finally:
        host.stop()
        assert all(child.poll() is not None for child in host.running.values())


def test_ray_job_ends_with_its_work_and_restarts_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = "if [ -e fell ]; then exec sleep 60; fi; touch fell; exit 3"
    work = f'until [ -e fell ]; do sleep .05; done; echo "$HOST_0 $NODE_RANK $GIVEN ${{#{KEY_VARIABLE}}}"'
    assert supervise_here(tmp_path, monkeypatch, server=server, work=work) == 0
    assert (tmp_path / "work-0.log").read_text() == "10.0.0.1 0 1 32\n"


def test_ray_job_stops_after_too_many_task_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervise_here(tmp_path, monkeypatch, server="exit 3", work="exec sleep 60") == 1


def test_ray_job_does_not_repeat_rejected_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = "echo >> starts; exit 2"
    assert supervise_here(tmp_path, monkeypatch, server=server, work="exec sleep 60") == 1
    assert (tmp_path / "starts").read_text() == "\n"


def test_ray_job_continues_without_optional_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = "until [ $(wc -l < starts) -ge 2 ]; do sleep .02; done; sleep .1"
    assert supervise_here(tmp_path, monkeypatch, optional="echo >> starts; exit 3", work=work) == 0


@pytest.mark.parametrize(("is_optional", "code"), [(True, 0), (False, 1)])
def test_a_lost_node_of_optional_servers_is_left_out(
    is_optional: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_rl.deployment.ray_job.POLL_S", 0.0)

    class Ended(Host):
        def start(self, *_: Any) -> None: ...

        def poll(self) -> dict[str, int]:
            return {"work": 0} if polls else {}

    class Lost(Ended):
        def poll(self) -> Any:
            polls.append(1)
            return None

    def get(value: Any) -> Any:
        if value is None and polls:
            raise ConnectionError
        return value

    polls: list[int] = []
    tasks = [RayTask("work", "w", [0], 1, True), RayTask("server", "s", [1], 1, False, is_optional)]
    plan = RayPlan("auto", 1, [{"CPU": 1}] * 2, str(tmp_path), str(tmp_path), {}, tasks)
    assert supervise(plan, [Direct(Ended()), Direct(Lost())], get, ConnectionError) == code


def test_ray_job_stops_the_tasks_beside_a_lost_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their actors, without which nothing would end their processes, stay until then."""
    events: list[str] = []

    def fail() -> None:
        raise ConnectionError

    def get(found: Any, timeout: float | None = None) -> None:
        for stop in found:
            stop()

    def wait(stops: Any, num_returns: int, timeout: float) -> None:
        assert num_returns == len(stops)
        for stop in stops:
            with suppress(ConnectionError):
                stop()

    stops = iter([fail, lambda: events.append("stopped")])
    actor = SimpleNamespace(stop=SimpleNamespace(remote=lambda: next(stops)))
    errors = SimpleNamespace(RayActorError=ConnectionError, GetTimeoutError=TimeoutError)
    host = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: actor))
    modules = {
        "ray": SimpleNamespace(init=lambda **_: None, get=get, wait=wait, remote=lambda _: host, exceptions=errors),
        "ray.util.placement_group": SimpleNamespace(
            placement_group=lambda *_, **__: SimpleNamespace(ready=lambda: ()),
            remove_placement_group=lambda _: events.append("removed"),
        ),
        "ray.util.scheduling_strategies": SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *_: None),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ray_job, "supervise", lambda *_: 1)
    assert ray_job.run(RayPlan("auto", 1, [{"CPU": 1}] * 2, "", "", {}, [])) == 1
    assert events == ["stopped", "removed"]
