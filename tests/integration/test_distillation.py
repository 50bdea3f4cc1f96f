"""Context distillation through the real processes, by the documented flags, with a tiny model on the CPU."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runner import ROOT, Runner, metric_rows, runner
from safetensors.torch import load_file

from prime_rl.monitor.local_runs import LocalRun
from prime_rl.monitor.logs import find_alerts
from prime_rl.runtime.machine import find_free_port
from rollouts.training.steps import complete_steps

CONFIG = """
max_steps = 3
max_async_level = 1
seq_len = 96

[model]
name = "tiny-qwen3"
debug = { random_init = true }

[inference.model]
device = "cpu"

[trainer]
micro_bs = 16

[trainer.model]
device = "cpu"

[trainer.optim]
lr = 1e-2

[orchestrator]
batch_size = 16
rollouts_per_example = 4

[orchestrator.sampling]
max_tokens = 8

[orchestrator.teacher_model]
context = "Say only a, b, c and d.\\n"
eval_baseline = true

[[orchestrator.env]]
id = "distillation_world:load_world"
name = "world"

{reference}
[orchestrator.eval]
interval = 3

[[orchestrator.eval.env]]
id = "distillation_world:load_world"
name = "world"
"""
REFERENCE = """[[orchestrator.env]]
id = "distillation_world:load_world"
name = "other"
teacher = "reference"
"""
DEADLINE_S = 600.0
"""Four processes start at once, which takes minutes on a machine that is busy with other things."""
pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    with runner(tmp_path / "said") as found:
        yield found


def launch(run: Runner, tmp_path: Path, flags: str, recipe: Path | None = None, steps: int = 3) -> Path:
    if recipe is None:
        (recipe := tmp_path / "rl.toml").write_text(CONFIG.replace("{reference}", REFERENCE))
    out = tmp_path / "out"
    options = ["--output-dir", out, "--inference.server.port", find_free_port(), *shlex.split(flags)]
    command = run.start("rl", "@", recipe, *options)
    assert command.wait(DEADLINE_S) == 0, f"{command.out}\n{command.err}"
    assert complete_steps(out / "weights")[-1] == steps
    return out


def warm_up(run: Runner, tmp_path: Path) -> str:
    """A model that answers with a letter of the reward, or with the one that a context names."""
    chats = [(f"Say {n:b}", "d") for n in range(32)]
    chats += [(f"Use {letter}.\nSay {n:b}", letter) for n in range(32) for letter in "abyz"]
    lines = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in chats]
    (data := tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ["--model.name", "tiny-qwen3", "--model.debug.random-init", "true", "--data.name", data, "--micro-bs", 16]
    options += ["--data.seq-len", 64, "--data.batch-size", 16, "--optim.lr", 3e-3, "--max-steps", 80]
    command = run.start("sft", *options, "--output-dir", tmp_path / "sft")
    assert command.wait(DEADLINE_S) == 0, command.err
    return str(tmp_path / "sft" / "weights" / "step_80")


def trainer_rows(out: Path, key: str) -> list[dict[str, Any]]:
    rows = metric_rows(out, "trainer", key)
    assert [row["step"] for row in rows] == [1, 2, 3]
    return rows


def test_a_teacher_of_its_own_by_the_documented_flags(run: Runner, tmp_path: Path) -> None:
    """The 8 GPU command of document 001, on the CPU; every distribution of the teacher is compared."""
    flags = (
        "--inference_gpu_ids 0 1 --teacher_gpu_ids 2 3 --trainer_gpu_ids 4 5 6 7 "
        "--inference.parallel.tp 2 --teacher_inference.parallel.tp 2 "
        "--trainer.loss.adv_tau 0 --trainer.loss.teacher_tau 1 --trainer.loss.distill.estimator full"
    )
    out = launch(run, tmp_path, flags)
    output = run.commands[-1]
    assert "the target is the teacher's distribution" in output.out and "is for GPUs" in output.err
    for row in trainer_rows(out, "teacher_kl_reverse/mean"):
        assert row["teacher_kl_reverse/min"] > -1e-5 and row["teacher_coverage/mean"] > 0
        assert {"teacher_kl/mean", "combined_advantage/mean", "loss/policy"} <= row.keys()
    [baseline] = metric_rows(out, "orchestrator", "eval/world/baseline_student/avg")
    assert baseline["step"] == 0
    gap = baseline["eval/world/baseline_teacher/avg"] - baseline["eval/world/baseline_student/avg"]
    assert baseline["eval/world/baseline_diff"] == pytest.approx(gap)
    measured = metric_rows(out, "orchestrator", "distill/world/kl_rev")
    assert [row["step"] for row in measured] == [0, 3]
    assert measured[0]["distill/world/teacher_context/avg"] == measured[1]["distill/world/teacher_context/avg"]
    steps = metric_rows(out, "orchestrator", "time/teacher_logprobs")
    assert not any(row["teacher/skipped/prompt"] + row["teacher/skipped/server"] for row in steps)
    assert [row["step"] for row in metric_rows(out, "orchestrator", "reward/mean")] == [1, 2, 3]
    records = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert all(record["prompt_text"] and record["teacher_logprobs"] for record in records)
    ends = [record for record in records if record["env"] == "other"]
    for record in ends[:4]:  # the teacher of a reference environment is the model before training, without the context
        assert record["versions"][0][1] or record["teacher_logprobs"] == pytest.approx(record["logprobs"], abs=1e-5)


def test_one_copy_of_the_weights_teaches_its_own_adapter(run: Runner, tmp_path: Path) -> None:
    out = launch(run, tmp_path, "--trainer.model.lora.rank 4 --trainer.loss.distill.estimator auto")
    assert not (out / "configs" / "teacher_inference.toml").exists(), "one server is enough"
    trainer_rows(out, "teacher_coverage/mean")
    records = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    later = [r for r in records if r["env"] == "other" and r["versions"][0][1] >= 1]
    assert later, "the adapter has sampled"
    gaps = [abs(a - b) for r in later for a, b in zip(r["logprobs"], r["teacher_logprobs"], strict=True)]
    assert max(gaps) > 1e-4, "and the teacher is the model without it"


def test_planted_bad_context_triggers_the_alarm(run: Runner, tmp_path: Path) -> None:
    """A context with a wrong instruction is distilled: log, metrics and page report what the student has lost."""
    text = CONFIG.replace("Say only a, b, c and d.", "Use z.").replace("{reference}", "")
    (recipe := tmp_path / "rl.toml").write_text(text)
    flags = f"--model.name {warm_up(run, tmp_path)} --model.debug.random-init false --max-steps 12 "
    flags += "--trainer.optim.lr 3e-3 --trainer.loss.adv-tau 0 --trainer.loss.teacher-tau 1 "
    flags += "--trainer.loss.distill.estimator topk+tail --trainer.loss.distill.direction forward "
    out = launch(run, tmp_path, flags + "--orchestrator.eval.interval 12", recipe, steps=12)
    first, last = metric_rows(out, "orchestrator", "distill/world/collapsed")
    assert (first["distill/world/collapsed"], last["distill/world/collapsed"]) == (0, 1)
    assert first["distill/world/student/avg"] > 0.9 and last["distill/world/student/avg"] < 0.1
    alarm = "the context teaches it wrong answers"
    assert alarm in (out / "logs" / "orchestrator.log").read_text()
    assert alarm in str(find_alerts(LocalRun(out)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--inference_gpu_ids 0 --teacher_gpu_ids 1 --trainer_gpu_ids 2,3",
        "--inference_gpu_ids 0,1 --teacher_gpu_ids 2 --trainer_gpu_ids 3 --inference.parallel.dp 2",
        "--inference_gpu_ids 0 1 --teacher_gpu_ids 2 3 --trainer_gpu_ids 4 5 6 7 "
        "--inference.parallel.tp 2 --teacher_inference.parallel.tp 2",
    ],
    ids=["4 GPUs", "4 GPUs, two engines", "8 GPUs"],
)
def test_the_documented_flags_on_the_tiny_recipe(run: Runner, tmp_path: Path, flags: str) -> None:
    """`tiny.toml` as it is, but from random weights and for three steps."""
    start = "--model.name tiny-qwen3 --model.debug.random_init true "
    start += "--max-steps 3 --trainer.scheduler.warmup_steps 0 --trainer.scheduler.decay_steps 3 "
    start += "--orchestrator.eval.interval 3 "
    out = launch(run, tmp_path, start + flags, ROOT / "experiments" / "context_distill" / "tiny.toml")
    assert "teacher_gpu_ids are ignored: the devices are set to the CPU" in run.commands[-1].err
    assert all(row["teacher_kl_reverse/mean"] > 0 for row in trainer_rows(out, "teacher_kl_reverse/mean"))
    assert [row["step"] for row in metric_rows(out, "orchestrator", "distill/facts/kl_rev")] == [0, 3]
    assert [row["step"] for row in metric_rows(out, "orchestrator", "distill/other-tables/kl_rev")] == [0, 3]


@pytest.mark.slow
def test_ema_teacher_survives_crash_and_resume(run: Runner, tmp_path: Path) -> None:
    """The average of every version is published and served; a resumed run continues the average."""
    flags = (
        "--trainer.model.lora.rank 4 --orchestrator.teacher_model.weights ema "
        "--orchestrator.teacher_model.ema_decay 0.5 --trainer.ckpt.interval 1 "
    )
    with pytest.raises(AssertionError):  # two steps only
        launch(run, tmp_path, flags + "--max-steps 2 --orchestrator.eval.interval 2")
    assert complete_steps(tmp_path / "out" / "weights")[-1] == 2, run.commands[-1].err
    out = launch(run, tmp_path, flags + "--trainer.ckpt.resume_step -1 --orchestrator.ckpt.resume_step -1")

    def tensors(root: str, step: int) -> dict[str, Any]:
        return load_file(out / root / f"step_{step}" / "adapter_model.safetensors")

    for step in (2, 3):
        before, now, mean = tensors("average", step - 1), tensors("weights", step), tensors("average", step)
        assert mean.keys() == now.keys() == before.keys()
        for name in mean:
            assert torch.allclose(mean[name], (before[name] + now[name]) / 2, atol=1e-7), f"{name} of step {step}"
    log = (out / "logs" / "teacher_inference.log").read_text()
    assert "Loaded weights version=3 " in log
    assert metric_rows(out, "orchestrator", "distill/world/teacher_context/avg")[-1]["step"] == 3
