"""Teacher configuration of `rl`: loss weights, servers, GPUs and ports; documented commands verbatim."""

from __future__ import annotations

import json
import random
import shlex
import shutil
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from prime_rl import rl
from prime_rl.config import RLConfig, teacher_follows_policy
from prime_rl.config_teacher import check_contexts, check_tokenizer, describe_taus
from prime_rl.configuration.errors import ConfigError
from prime_rl.launcher import gpus
from prime_rl.orchestrator import orchestrator
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.distillation import inspect_contexts
from prime_rl.orchestrator.distillation.context import ContextProvider
from prime_rl.orchestrator.distillation.teacher import build_teacher
from prime_rl.runtime.machine import find_free_port
from prime_rl.runtime.tokenizer import ASSETS_DIR, load_tokenizer
from prime_rl.trainer.rl.loss import build_objective
from prime_rl.utils.pydantic_config import parse_argv, write_config

CONTEXT = ("--orchestrator.teacher_model.context", "Think first.\n")
LORA = ("--trainer.model.lora.rank", "16", "--inference.backend", "embedded")


FAR = ("--orchestrator.teacher_model.client.base_url", "http://far:9/v1")
SHARED = (
    *("--no-inference", "--orchestrator.client.base_url", "http://near:8000/v1"),
    *("--orchestrator.teacher_model.client.base_url", "http://near:8000/v1"),
)
NEAR = (
    *("--no-inference", "--orchestrator.client.base_url", "http://localhost:8000/v1"),
    *("--orchestrator.teacher_model.client.base_url", "http://127.0.0.1:8000/v1/"),
)


def parse(*argv: str) -> RLConfig:
    return parse_argv(RLConfig, ["--model.name", "tiny-qwen3", *argv], "rl", {})[0]


def test_a_resolved_configuration_is_read_back(tmp_path: Path) -> None:
    config = parse(*CONTEXT, "--teacher_inference.max_batch_size", "9")
    assert config.teacher_inference is not None and "given" not in config.provenance.values()
    write_config(config, tmp_path / "rl.toml")
    assert parse("@", str(tmp_path / "rl.toml")) == config


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--inference.server.api-key-var", "MINE"], "MINE"),
        (["--inference.server.api-key-var", "MINE", "--orchestrator.teacher_model.weights", "live"], "MINE"),
        (["--inference.server.api-key-var", "MINE", "--teacher_inference.server.api-key-var", "OWN"], "OWN"),
        (["--orchestrator.teacher_model.client.api-key-var", "OWN"], "OWN"),
    ],
)
def test_the_teacher_gets_the_key_of_its_server(options: list[str], expected: str) -> None:
    teacher = parse(*CONTEXT, *options).orchestrator.teacher_model
    assert teacher is not None and teacher.client.api_key_var == expected


@pytest.mark.parametrize(
    ("given", "taus"),
    [
        ({}, (0.5, 0.5, 0.5)),
        ({"teacher_tau": 1.0}, (0.5, 1.0, 1.0)),
        ({"adv_tau": 0.0, "teacher_tau": 1.0, "student_tau": 0.5}, (0.0, 1.0, 0.5)),
        ({"student_tau": 0.1}, (0.5, 0.5, 0.1)),
    ],
)
def test_taus_with_a_teacher(given: dict[str, float], taus: tuple[float, float, float]) -> None:
    argv = [word for name, value in given.items() for word in (f"--trainer.loss.{name}", str(value))]
    config = parse(*CONTEXT, *argv)
    loss = config.trainer.loss
    assert (loss.adv_tau, loss.teacher_tau, loss.student_tau) == taus
    text = describe_taus(loss)
    assert "reverse KL" in text if taus[1] == taus[2] else f"p_teacher^({taus[1] / taus[2]:g})" in text
    assert any(line == text for line in rl.explain(config)), "--dry-run prints them"


@pytest.mark.parametrize(
    ("found", "options", "is_ours"),
    [
        ([], (), True),
        ([0], (), False),
        ([0], ("--inference.exact",), True),
        ([0], ("--inference.model.device", "cuda:0"), True),
        ([0], ("--weight_broadcast.type", "nccl"), True),
    ],
)
def test_the_engine_that_is_chosen_serves_the_base_model(
    monkeypatch: pytest.MonkeyPatch, found: list[int], options: tuple[str, ...], is_ours: bool
) -> None:
    monkeypatch.setattr("prime_rl.runtime.machine.is_installed", lambda name: True)
    monkeypatch.setattr("prime_rl.runtime.machine.find_gpus", lambda: found)
    frozen = ("--orchestrator.teacher_model.weights", "frozen", "--trainer.loss.kl_coef", "0.01", *LORA[:2])
    assert (parse(*frozen, *options).teacher_inference is None) == is_ours


@pytest.mark.parametrize("lora", [(), LORA])
@pytest.mark.parametrize("taus", [(), ("--trainer.loss.teacher_tau", "0", "--trainer.loss.adv_tau", "1")])
def test_the_first_weights_are_a_reference(lora: tuple[str, ...], taus: tuple[str, ...]) -> None:
    config = parse("--orchestrator.teacher_model.weights", "frozen", "--trainer.loss.kl_coef", "0.01", *taus, *lora)
    loss = config.trainer.loss
    assert (loss.adv_tau, loss.teacher_tau, loss.student_tau) == (1.0, 0.0, 0.0)
    assert "only the reference of a KL" in describe_taus(loss)
    assert (config.teacher_inference is None) == bool(lora), "an engine with an adapter also serves the base model"


@pytest.mark.parametrize(
    "given", [CONTEXT, ("--trainer.loss.student_tau", "0.5", "--teacher_inference.model.name", "x")]
)
def test_a_reference_kl_is_added_to_a_distillation(given: tuple[str, ...]) -> None:
    loss = parse(
        "--orchestrator.teacher_model.weights", "frozen", "--trainer.loss.kl_coef", "0.01", *given
    ).trainer.loss
    assert (loss.adv_tau, loss.teacher_tau, loss.student_tau) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("distill", "words"),
    [
        ({"estimator": "topk+tail", "direction": "forward"}, "(forward KL)"),
        ({"estimator": "topk+tail", "direction": "jsd"}, "Jensen-Shannon"),
        ({"estimator": "auto"}, "forward KL for tokens"),
    ],
)
def test_the_direction_of_a_distribution_is_named(distill: dict[str, str], words: str) -> None:
    options = [word for name, value in distill.items() for word in (f"--trainer.loss.distill.{name}", value)]
    assert words in describe_taus(parse(*CONTEXT, *options).trainer.loss)


def test_taus_without_a_teacher() -> None:
    loss = parse().trainer.loss
    assert (loss.adv_tau, loss.teacher_tau, loss.student_tau) == (1.0, 0.0, None)
    assert "collapse" in describe_taus(loss.model_copy(update={"teacher_tau": 1.0, "student_tau": 0.0}))


DOCUMENTED = {
    "000": "--inference_gpu_ids 0 --teacher_gpu_ids 1 --trainer_gpu_ids 2,3",
    "001, first": "--inference_gpu_ids 0,1 --teacher_gpu_ids 2 --trainer_gpu_ids 3 --inference.parallel.dp 2",
    "001, 4 GPUs": "--inference_gpu_ids 0 --teacher_gpu_ids 1 --trainer_gpu_ids 2 3",
    "001, 8 GPUs": "--inference_gpu_ids 0 1 --teacher_gpu_ids 2 3 --trainer_gpu_ids 4 5 6 7 "
    "--inference.parallel.tp 2 --teacher_inference.parallel.tp 2",
}
MAPS = {
    "000": ["inference GPU 0", "teacher   GPU 1", "trainer   GPU 2,3"],
    "001, first": ["inference GPU 0,1", "teacher   GPU 2", "trainer   GPU 3"],
    "001, 4 GPUs": ["inference GPU 0", "teacher   GPU 1", "trainer   GPU 2,3"],
    "001, 8 GPUs": ["inference GPU 0,1", "teacher   GPU 2,3", "trainer   GPU 4,5,6,7"],
}


@pytest.mark.parametrize("commas", [False, True])
@pytest.mark.parametrize("where", list(DOCUMENTED))
def test_documented_commands_draw_their_map_of_gpus(
    where: str, commas: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For any machine, and in both spellings of a list."""
    command = DOCUMENTED[where].replace("0 1 ", "0,1 ").replace("2 3 ", "2,3 ").replace("4 5 6 7", "4,5,6,7")
    argv = shlex.split(command if commas else DOCUMENTED[where].replace(",", " "))
    monkeypatch.setattr("sys.argv", ["rl", "--model.name", "tiny-qwen3", *CONTEXT, *argv, "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        rl.main()
    assert ended.value.code == 0
    comments = [line[2:] for line in capsys.readouterr().out.splitlines() if line.startswith("# ")]
    assert comments[:3] == MAPS[where]


def test_teacher_server_inherits_inference_config() -> None:
    port = find_free_port()
    config = parse(
        *CONTEXT,
        *shlex.split(DOCUMENTED["001, 8 GPUs"]),
        *("--inference.server.port", str(port), "--inference.max_batch_size", "7", "--inference.seed", "3"),
        *("--teacher_inference.max_batch_size", "9", "--seq-len", "512"),
    )
    own, teacher = config.teacher_inference, config.orchestrator.teacher_model
    assert own is not None and teacher is not None and config.inference is not None
    assert (own.parallel.tp, own.parallel.dp, own.max_batch_size) == (2, 1, 9)
    assert own.model.name == config.inference.model.name == teacher.model.name == "tiny-qwen3"
    assert own.server.port > port and teacher.client.base_url == [f"http://127.0.0.1:{own.server.port}/v1"]
    assert own.model.max_model_len is not None and own.model.max_model_len > config.seq_len
    assert own.name == "teacher_inference"
    assert parse(*CONTEXT, "--inference.max_batch_size", "7").teacher_inference.max_batch_size == 7  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("contexts", "added"),
    [
        ({"teacher_model.context": "x"}, 1 + 64),
        ({"teacher_model.context": "x", "env.0.context": "y" * 1000}, 1000 + 64),
        ({"teacher_model.context": "x", "env.0.context": "y" * 5000}, 2048 - 512),  # the model's window
        ({"teacher_model.context": "x", "env.0.context_fn": "json:dumps"}, 512),
        ({"teacher_model.context_template": "T" * 1000 + "{{example.x}}"}, 1013 + 64),
        ({"teacher_model.context_template": "{{example.x}}"}, 512),
        ({"teacher_model.model.name": "other"}, 512),
    ],
)
def test_the_teacher_has_space_for_every_context(contexts: dict[str, str], added: int) -> None:
    options = [word for key, text in contexts.items() for word in (f"--orchestrator.{key}", text)]
    server = parse("--seq-len", "512", *options).teacher_inference
    assert server is not None and server.model.max_model_len == 512 + added


def test_one_sglang_server_is_not_both_student_and_teacher() -> None:
    """It holds one model; the teacher is ours unless a second one is named."""
    student = ("--inference.backend", "sglang", "--inference.sglang.base-url", "http://localhost:1")
    teacher = parse(*CONTEXT, *student).teacher_inference
    assert teacher is not None and (teacher.backend, teacher.sglang.base_url) == ("auto", None)
    second = ("--teacher-inference.backend", "sglang", "--teacher-inference.sglang.base-url")
    teacher = parse(*CONTEXT, *student, *second, "http://localhost:2").teacher_inference
    assert teacher is not None and teacher.sglang.base_url == "http://localhost:2"
    with pytest.raises(ConfigError, match="is the student's server"):
        parse(*CONTEXT, *student, *second, "http://localhost:1")


def test_a_port_that_is_taken_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        own = parse(*CONTEXT, "--inference.server.port", str(port - 1)).teacher_inference
    assert own is not None and own.server.port > port


def test_adapter_student_and_teacher_share_one_server() -> None:
    config = parse(*CONTEXT, *LORA)
    teacher = config.orchestrator.teacher_model
    assert config.teacher_inference is None and teacher is not None
    assert teacher.model.name == "base" and teacher.client.base_url == config.orchestrator.client.base_url
    merged = parse(*CONTEXT, *LORA, "--trainer.model.lora.merge")
    assert merged.teacher_inference is not None, "merged into the weights, the adapter cannot be left out"
    assert parse(*CONTEXT, *LORA, "--teacher_gpu_ids", "1").teacher_inference is not None


@pytest.mark.parametrize("server", [(), ("--no-inference",)])
def test_a_live_teacher_is_the_student(server: tuple[str, ...]) -> None:
    config = parse(*CONTEXT, "--orchestrator.teacher_model.weights", "live", *server)
    teacher = config.orchestrator.teacher_model
    assert config.teacher_inference is None and teacher is not None
    assert teacher.model.name == "tiny-qwen3" and teacher.client.base_url == config.orchestrator.client.base_url


ANCHORED = ("--orchestrator.env", '[{"id": "a"}, {"id": "b", "teacher": "reference"}]')


def test_ema_teacher_has_its_own_server_and_trainer_average() -> None:
    follow = ("--orchestrator.teacher_model.weights", "ema")
    for lora in ((), LORA):
        config = parse(*CONTEXT, *follow, *lora)
        teacher = config.orchestrator.teacher_model
        assert config.teacher_inference is not None and teacher is not None
        assert teacher.client.base_url != config.orchestrator.client.base_url and teacher.model.name == "tiny-qwen3"
        assert config.trainer.ema_decay == teacher.ema_decay == 0.98
    config = parse(*CONTEXT, *follow, "--orchestrator.teacher_model.ema_decay", "0.9")
    assert config.trainer.ema_decay == 0.9 and teacher_follows_policy(config)
    assert parse(*CONTEXT).trainer.ema_decay is None and not teacher_follows_policy(parse(*CONTEXT))


@pytest.mark.parametrize("weights", ["ema", "live"])
def test_references_need_the_weights_before_training(weights: str) -> None:
    argv = (*CONTEXT, "--orchestrator.teacher_model.weights", weights, *ANCHORED)
    with pytest.raises(ConfigError, match=r"leaves no server with[\s\S]*trainer.model.lora"):
        parse(*argv)
    config = parse(*argv, *LORA)
    assert config.orchestrator.teacher_model is not None
    teacher = build_teacher(config.orchestrator)
    assert teacher is not None and (teacher.scorer.model, teacher.reference.model) == ("tiny-qwen3", "base")
    frozen = build_teacher(parse(*CONTEXT, *ANCHORED).orchestrator)
    assert frozen is not None and frozen.reference is frozen.scorer


def test_references_may_be_the_only_use_of_the_teacher() -> None:
    taus = ("--trainer.loss.adv_tau", "1", "--trainer.loss.teacher_tau", "0")
    envs = '[{"id": "a", "teacher": "none"}, {"id": "b", "teacher": "reference"}]'
    first = ("--orchestrator.teacher_model.weights", "frozen")
    config = parse(*first, *taus, "--orchestrator.env", envs)
    assert config.orchestrator.teacher_model is not None and config.trainer.loss.needs_teacher is None
    with pytest.raises(ConfigError, match=r'env\.0\.teacher = "context" has no effect with .*: set it to "none"'):
        parse(*first, *taus, *ANCHORED)


def test_an_external_teacher() -> None:
    config = parse(*CONTEXT, *FAR)
    assert config.teacher_inference is None and config.orchestrator.teacher_model is not None
    assert config.orchestrator.teacher_model.client.base_url == ["http://far:9/v1"]


def test_address_of_the_student_is_frozen_as_its_base_model() -> None:
    url = parse(*LORA).orchestrator.client.base_url[0]
    config = parse(*CONTEXT, *LORA, "--orchestrator.teacher_model.client.base_url", url)
    assert config == parse(*CONTEXT, *LORA)
    running = parse(*CONTEXT, *LORA, *SHARED, "--orchestrator.teacher_model.model.name", "base")
    assert running.orchestrator.teacher_model is not None
    assert running.orchestrator.teacher_model.client.base_url == running.orchestrator.client.base_url
    assert parse(*CONTEXT, *SHARED, "--orchestrator.teacher_model.weights", "live").inference is None


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("auto", 8), ("token", 0), ("reward_to_go", 0), ("sequence", 0), ("topk+tail", 8), ("full", -1)],
)
def test_teacher_top_logprobs_follow_the_estimator(estimator: str, expected: int) -> None:
    config = parse(*CONTEXT, "--trainer.loss.distill.estimator", estimator)
    assert config.orchestrator.teacher_model is not None
    assert config.orchestrator.teacher_model.top_logprobs == expected == config.trainer.loss.distill.top_logprobs


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--teacher_gpu_ids", "1"], "teacher_gpu_ids"),
        (["--trainer.loss.teacher_tau", "1"], r"set \[orchestrator.teacher_model\]"),
        ([*CONTEXT, "--trainer.loss.teacher_tau", "0"], "has no effect with"),
        (
            [*CONTEXT, "--trainer.loss.adv_tau", "0", "--orchestrator.env.0.teacher", "none"],
            r'env\.0\.teacher = "none" trains on rewards alone, whose weight is trainer\.loss\.adv_tau = 0: raise it',
        ),
        ([*CONTEXT, "--orchestrator.teacher_model.eval_baseline"], r"add \[orchestrator.eval\]"),
        (
            [*CONTEXT, "--orchestrator.teacher_model.client.base_url", "http://a/v1", "--teacher_gpu_ids", "1"],
            "remove one",
        ),
        ([*CONTEXT, "--orchestrator.teacher_model.weights", "live", "--teacher_gpu_ids", "1"], "leave teacher_gpu_ids"),
        ([*CONTEXT, *FAR, "--orchestrator.teacher_model.weights", "live"], "set teacher_model.client.base_url to"),
        ([*CONTEXT, *SHARED], 'set another server, teacher_model.model.name = "base" if it serves LoRA'),
        ([*CONTEXT, *SHARED, "--orchestrator.teacher_model.model.name", "tiny-qwen3"], "set another server"),
        ([*CONTEXT, *SHARED, "--orchestrator.teacher_model.model.name", "base"], "publishes no LoRA adapters"),
        ([*CONTEXT, *SHARED, "--orchestrator.teacher_model.weights", "ema"], "set another server or"),
        ([*CONTEXT, *NEAR], "set another server"),
        ([*CONTEXT, *NEAR, "--orchestrator.teacher_model.model.name", "base"], "publishes no LoRA adapters"),
        ([*CONTEXT, "--orchestrator.teacher_model.top_logprobs", "3"], "it follows the estimator"),
        ([*CONTEXT, "--trainer.loss.distill.direction", "forward"], "set estimator to"),
        ([*CONTEXT, "--trainer.loss.distill.estimator", "full", "--trainer.loss.distill.clip", "5"], "remove it"),
    ],
)
def test_what_does_not_fit_is_refused(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        parse(*argv)
    assert str(error.value).count("\n") <= 2


def test_gpus_for_a_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(gpus, "find_gpus", lambda: found)
    found[:] = [0, 1, 2]
    assert gpus.assign_gpus(parse(*CONTEXT)) == gpus.GpuAssignment((1,), (0,), (2,))
    found[:] = [0, 1]
    assert gpus.assign_gpus(parse(*CONTEXT)) == gpus.GpuAssignment((1,), (0,), (0,)), "it shares that of inference"
    with pytest.raises(ValueError, match=r"teacher_gpu_ids = \[1, 2\]"):
        gpus.assign_gpus(parse(*CONTEXT, "--teacher_gpu_ids", "1,2", "--teacher_inference.parallel.tp", "1",
                                  "--teacher_inference.parallel.dp", "1"))  # fmt: skip
    found.clear()
    with pytest.raises(ValueError, match="leave it out"):
        gpus.assign_gpus(parse(*CONTEXT, "--teacher_gpu_ids", "0"))


def test_gpu_keys_are_ignored_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_gpus", lambda: [])
    cpu = ("--trainer.model.device", "cpu", "--inference.model.device", "cpu")
    config = parse(*CONTEXT, *cpu, *shlex.split(DOCUMENTED["001, 8 GPUs"]))
    assert gpus.assign_gpus(config) == gpus.GpuAssignment(None, None)
    assert config.inference is not None and config.teacher_inference is not None
    assert config.inference.parallel.tp == config.teacher_inference.parallel.tp == 1
    assert sum("is for GPUs" in note for note in config.notes) == 2
    assert sum("are ignored" in note for note in config.notes) == 3


def test_prompts_of_student_and_teacher_are_shown_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    env = ("--orchestrator.env", '[{"id": "test_rl_teacher:build_world"}]')
    path = str(tmp_path / "c.md")
    Path(path).write_text("Think first.\n")
    argv = ["--model.name", "tiny-qwen3", "--teacher_model.context_file", path, "--env", env[1]]
    monkeypatch.setattr("sys.argv", ["orchestrator", *argv, "--inspect-context", "1", "--output-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        orchestrator.main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.count("Think first.") == 1 and shown.count("Two plus two?") == 2
    assert "student (" in shown and "teacher (" in shown and not (tmp_path / "logs").exists()
    assert parse(*CONTEXT, "--inspect-context", "2").orchestrator.teacher_model.inspect_context == 2  # type: ignore[union-attr]


def test_shown_prompts_have_the_arguments_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ style }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

    def load(name: str) -> Any:
        return load_tokenizer(name, template)

    monkeypatch.setattr(inspect_contexts, "load_tokenizer", load)
    sampling = {"extra_body": {"chat_template_kwargs": {"style": "brief"}}}
    values = {"model": {"name": "tiny-qwen3"}, "env": [{"id": "test_rl_teacher:build_world"}], "sampling": sampling}
    config = OrchestratorConfig.model_validate({**values, "teacher_model": {"context": "C ", "inspect_context": 1}})
    assert inspect_contexts.inspect_contexts(config, 1).count("brief<|im_start|>") == 2


def test_environments_without_a_teacher_need_no_context() -> None:
    """Their rows may lack the keys of the template."""
    world = "test_rl_teacher:build_world"
    envs = [{"id": world, "name": "taught"}, {"id": world, "name": "rewarded", "teacher": "none"}]
    envs[0]["context"] = "C "
    teacher = {"context_template": "{{example.fact}} ", "inspect_context": 1}
    config = OrchestratorConfig.model_validate({"model": {"name": "tiny-qwen3"}, "env": envs, "teacher_model": teacher})
    text = inspect_contexts.inspect_contexts(config, 1)
    assert text.count("C Two plus two?") == 1 and "rewarded, prompt 0: no teacher" in text


def build_world() -> dict[str, Any]:
    return {"dataset": [{"prompt": "Two plus two?"}, {"prompt": "Three?"}], "rewards": lambda completion: 0.0}


@pytest.mark.parametrize(
    ("name", "context_from", "weights", "estimator", "taus"),
    [
        ("sdpo", "sibling", "frozen", ("topk+tail", "reverse", "none", 8), (0.0, 1.0, 1.0)),
        ("opsd", "answer", "frozen", ("full", "jsd", "none", -1), (0.0, 1.0, 1.0)),
        ("sdpg", "answer", "live", ("full", "reverse", "positive", -1), (1.0, 0.001, 0.001)),
    ],
)
def test_self_distillation_sets_both_halves(
    name: str, context_from: str, weights: str, estimator: tuple[Any, ...], taus: tuple[float, ...]
) -> None:
    group = ("--orchestrator.rollouts_per_example", "4")
    config = parse("--trainer.loss.type", name, *group)
    teacher, loss = config.orchestrator.teacher_model, config.trainer.loss
    assert teacher is not None and (teacher.context_from, teacher.weights) == (context_from, weights)
    objective = build_objective(loss, 48)
    distill = objective.distill
    assert (distill.estimator, distill.direction, distill.gate, teacher.top_logprobs) == estimator
    assert (objective.adv_tau, objective.teacher_tau, objective.student_tau) == taus
    assert not config.trainer.ema_decay
    own = ["--orchestrator.teacher_model.context", "C ", "--orchestrator.teacher_model.weights", "frozen"]
    config = parse("--trainer.loss.type", name, *group, *own, "--trainer.loss.distill.estimator", "token")
    teacher = config.orchestrator.teacher_model
    assert teacher is not None and (teacher.context_from, teacher.weights, teacher.top_logprobs) == (None, "frozen", 0)
    assert build_objective(config.trainer.loss, 48).distill.direction == "reverse"


@pytest.mark.parametrize(
    ("envs", "context_from"),
    [
        ('[{"id": "a", "context": "A "}, {"id": "b"}]', "answer"),
        ('[{"id": "a", "context": "A "}, {"id": "b", "teacher": "reference"}]', None),
        ('[{"id": "a", "context_from": "sibling"}]', None),
    ],
)
def test_self_distillation_fills_only_missing_contexts(envs: str, context_from: str | None) -> None:
    config = parse(
        "--trainer.loss.type", "opsd", "--orchestrator.rollouts_per_example", "4", "--orchestrator.env", envs
    )
    assert config.orchestrator.teacher_model is not None
    assert config.orchestrator.teacher_model.context_from == context_from


def test_context_beyond_the_window_is_refused_before_the_start(tmp_path: Path) -> None:
    keys = ("--model.name", "tiny-qwen3", "--teacher_inference.model.max_model_len", "64")
    config = parse(*keys, "--orchestrator.teacher_model.context", "short ")
    check_contexts(config.orchestrator, config.inference, config.teacher_inference)
    (tmp_path / "c.md").write_text("one long sentence. " * 30)
    config = parse(*keys, "--orchestrator.teacher_model.context_file", str(tmp_path / "c.md"))
    message = (
        r"orchestrator\.teacher_model\.context_file has \d+ tokens and the model's window is 64: shorten the context"
    )
    with pytest.raises(ValueError, match=message):
        check_contexts(config.orchestrator, config.inference, config.teacher_inference)


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """Ids of a few reserved tokens may have other names, and each model may have tokens of its own."""
    text = (ASSETS_DIR / "tiny-qwen3" / "tokenizer.json").read_text()
    tokenizer = json.loads(text)
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    changed = {
        "shorter": json.dumps({**json.loads(text), "added_tokens": tokenizer["added_tokens"][:-1]}),
        "renamed": text.replace("<combined_alphabetical_sorted>", "<reserved>"),
        "reordered": json.dumps(tokenizer),
    }
    for name, found in changed.items():
        shutil.copytree(ASSETS_DIR / "tiny-qwen3", tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text(found)
        teacher = parse(*CONTEXT, "--teacher_inference.model.name", str(tmp_path / name)).teacher_inference
        message = r"orchestrator\.teacher_model\.model\.name = .*reordered' has another tokenizer than model\.name"
        with pytest.raises(ValueError, match=message) if name == "reordered" else nullcontext():
            check_tokenizer("tiny-qwen3", teacher)
    check_tokenizer("tiny-qwen3", None)
    hub = parse(*CONTEXT, "--teacher_inference.model.name", "nobody/nothing").teacher_inference
    check_tokenizer("tiny-qwen3", hub)


@pytest.mark.parametrize("weights", ["frozen", "live"])
def test_a_shared_engine_scores_up_to_the_models_window(weights: str) -> None:
    """The student's window, at most seq_len, is that of its own samples."""
    text, teacher = "one long sentence. " * 30, "--orchestrator.teacher_model"
    keys = ("--model.name", "tiny-qwen3", "--seq_len", "64", f"{teacher}.weights", weights, f"{teacher}.context")
    config = parse(*keys, text, *LORA)
    assert config.teacher_inference is None and config.orchestrator.teacher_model is not None
    check_contexts(config.orchestrator, config.inference, config.teacher_inference)
    contexts = ContextProvider(config.orchestrator.teacher_model, config.orchestrator.env, 0)
    contexts.check_rows(config.orchestrator.env[0].id, [{"prompt": "Two?"}], "tiny-qwen3")
    config = parse(*keys, text * 1000, *LORA)
    with pytest.raises(ValueError, match="shorten the context"):
        check_contexts(config.orchestrator, config.inference, config.teacher_inference)


def test_eval_baseline_needs_room_for_the_context() -> None:
    keys = ("--seq_len", "64", "--orchestrator.teacher_model.context", "one long sentence. " * 30)
    config = parse(*keys)
    check_contexts(config.orchestrator, config.inference, config.teacher_inference)
    config = parse(*keys, "--orchestrator.teacher_model.eval_baseline", "--orchestrator.eval.interval", "10")
    with pytest.raises(ValueError, match=r"with which eval_baseline evaluates the student, .* is 64: .* raise seq_len"):
        check_contexts(config.orchestrator, config.inference, config.teacher_inference)


def hint_of(example: dict[str, Any], rng: random.Random) -> list[dict[str, str]]:
    return [{"role": "user", "content": example["info"]["hint"]}]


@pytest.mark.parametrize(
    "context", [{"context_template": "{{example.info.hint}} "}, {"context_fn": "test_rl_teacher:hint_of"}], ids=str
)
def test_contexts_of_rows_are_measured_before_rollouts(context: dict[str, str]) -> None:
    [(source, value)] = context.items()
    keys = ("--teacher_inference.model.max_model_len", "64", f"--orchestrator.teacher_model.{source}", value)
    config = parse(*keys).orchestrator
    assert config.teacher_model is not None and config.teacher_model.max_model_len == 64
    contexts, name = ContextProvider(config.teacher_model, config.env, config.seed), config.env[0].id
    rows = [{"prompt": "Two?", "info": {"hint": "word " * (200 * (i == 2) + 1)}} for i in range(4)]
    contexts.check_rows(name, rows[:2], "tiny-qwen3")
    with pytest.raises(ValueError, match=r"the context of row 2 of .* has \d+ tokens and the .* is 64: shorten the"):
        contexts.check_rows(name, rows, "tiny-qwen3")
