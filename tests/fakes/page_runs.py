"""Synthetic run directories for the tests of the page: several environments, tools, a teacher, and hostile texts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from prime_rl.monitor.local_runs import LocalRun
from prime_rl.monitor.rollout_index import RolloutIndex
from prime_rl.runtime.run_state import StateRecorder
from rollouts.training.metrics import append_jsonl

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'><b>bold</b> &amp; \u2028 \x1b[2J"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz "
VOCAB = {letter: number for number, letter in enumerate([*LETTERS, *"<>/='.&;:{}\"[],_|!\\\u0120\u010a0123456789"])}


def write_page_run(path: Path, *, num_steps: int = 12, groups: int = 3, size: int = 4, completion_len: int = 8) -> Path:
    """A run of `num_steps` steps with `groups` groups of `size` rollouts each; returns its directory."""
    append_jsonl(path / "metrics.jsonl", [row for step in range(1, num_steps + 1) for row in metric_rows(step)])
    rng = random.Random(0)
    for step in range(1, num_steps + 1):
        append_jsonl(path / "samples.jsonl", sample_rows(rng, step, groups, size, completion_len))
    (path / "configs").mkdir(parents=True)
    (path / "configs" / "trainer.toml").write_text(
        f'max_steps = {num_steps}  # command line\n# micro_bs = 4  # default\n\n[model]\nname = "tiny"  # run.toml:3\n'
        'note = "<b>not bold</b>"  # PRIME_NOTE\n'
    )
    weights = path / "weights" / f"step_{num_steps}"
    weights.mkdir(parents=True)
    (weights / "STABLE").touch()
    tokenizer = {
        "model": {"vocab": VOCAB},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": [{"id": 900, "content": "<end>"}],
    }
    (weights / "tokenizer.json").write_text(json.dumps(tokenizer))
    (weights / "manifest.json").write_text(json.dumps({"tensors": {"w": {"dtype": "float32", "shape": [2]}}}))
    (path / "evals" / f"step_{num_steps}" / "alpha").mkdir(parents=True)
    summary = {"step": num_steps, "avg@2": 0.75, "avg@2/stderr": 0.01, "pass@2": 0.9}
    (path / "evals" / f"step_{num_steps}" / "alpha" / "summary.json").write_text(json.dumps(summary))
    return path


def write_distillation_run(path: Path, num_steps: int = 12, verified: bool = False) -> Path:
    """A pure context distillation: rewards of 0 that nothing computes, a teacher, evaluations at steps 0 and the last.

    `verified`: the reward functions run, though nothing trains on the rewards.
    """
    rng, rows = random.Random(1), []
    for step in range(1, num_steps + 1):
        head = {"step": step, "timestamp": 1000.0 + 2 * step}
        learned = {"loss/mean": 1 / step, "teacher_kl/mean": 2 / step, "reference_kl/mean": 0.01, "adv/reward_abs": 0.0}
        rewards = {"reward/mean": 0.1 if verified else 0.0, "batch/effective_batch_size": 0.0, "batch/solve_none": 1.0}
        counts = {"teacher/skipped/overlong": 2.0 * (step == 3), "progress/samples": 12.0, "progress/problems": 3.0}
        rows.append({**head, "process": "trainer", **learned, "batch/tokens": 200})
        rows.append({**head, "process": "orchestrator", **rewards, **counts, "time/teacher_logprobs": 0.5})
        samples = [row | {"reward": 0.0, "advantage": 0.0} for row in sample_rows(rng, step) if row["tokens"]]
        del samples[0]["teacher_logprobs"]
        append_jsonl(path / "samples.jsonl", samples)
    closed = {"gap_closed": 0.8, "gap_closed/ci_low": 0.6, "gap_closed/ci_high": 1.1}
    for step, facts, kept in ((0, {"student/avg": 0.1}, 1.0), (num_steps, {"student/avg": 0.5, **closed}, 0.7)):
        arms = {"student_context/avg": 0.6, "teacher_context/avg": 0.6, "kl_rev": 0.05, "collapsed": 0.0, **facts}
        other = {"student/avg": 0.4 * kept, "retention": kept}
        found = {f"distill/facts/{key}": value for key, value in arms.items()}
        found |= {f"distill/other/{key}": value for key, value in other.items()}
        rows.append({"step": step, "timestamp": 1100.0, "process": "orchestrator", **found})
    append_jsonl(path / "metrics.jsonl", rows)
    (path / "configs").mkdir(parents=True)
    loss = "[loss]\nadv_tau = 0.0\nteacher_tau = 1.0\nstudent_tau = 1.0\n"
    (path / "configs" / "trainer.toml").write_text(f'max_steps = {num_steps}\n{loss}[model]\nname = "tiny"\n')
    verification = f"[buffer]\nskip_verification = {str(not verified).lower()}\n"
    teacher = '[teacher_model]\ncontext = "a is 1"\ncontext_file = "None"\neval_baseline = true\n'
    (path / "configs" / "orchestrator.toml").write_text(f"max_async_level = 1\n{verification}{teacher}")
    return path


def write_context_search(path: Path) -> Path:
    """A search of contexts: a chain of eight accepted ones, the best one with a hostile text, and rejected ones."""
    candidates = [search_row(0, None, "accepted", 0.25, "a is 1", "a is 1")]
    for number in range(1, 17):
        is_accepted, parent = number % 2 == 1, max(number - 1 - number % 2, 0)
        text = (
            HOSTILE
            if number == 15
            else f"a is 1\nb is {number}, which is a fact that takes more than one line of a phone"
        )
        status, mean = ("accepted", 0.25 + number / 20) if is_accepted else ("rejected", 0.5)
        if number == 16:
            status, mean = "duplicate", None
        candidates.append(search_row(number, parent, status, mean, text, f"@@ -1 +1,2 @@\n a is 1\n-b is 0\n+{text}"))
    candidates[15] |= {"best": True, "front": [0, 1, 2]}
    (path / "evolve").mkdir(parents=True)
    append_jsonl(path / "evolve" / "candidates.jsonl", candidates)
    scores = [
        {"evolve/best": 0.25 + n / 20, "evolve/score": 0.25 + (n % 2) * n / 20, "evolve/rollouts": 4.0 * n}
        for n in range(17)
    ]
    rows = [{"step": n, "timestamp": 1000.0 + n, "process": "evolve", **values} for n, values in enumerate(scores)]
    with StateRecorder(path, "evolve"):
        append_jsonl(path / "metrics.jsonl", rows)
    (path / "configs").mkdir()
    (path / "configs" / "evolve.toml").write_text('budget = 100  # default\n\n[model]\nname = "tiny"  # command line\n')
    return path


def search_row(
    number: int, parent: int | None, status: str, mean: float | None, text: str, diff: str
) -> dict[str, Any]:
    """One line of candidates.jsonl."""
    row = {"number": number, "parent": parent, "status": status, "mean": mean, "minibatch": [0], "scores": {"0": mean}}
    return {**row, "text": text, "diff": diff, "front": [], "best": False}


def write_evaluation(run: Path, step: int, rewards: list[float | None]) -> None:
    """What `eval` leaves of two examples, of which one is hostile."""
    folder = run / "evals" / f"step_{step}" / "alpha"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "example_id": k // 2,
            "rollout_idx": k % 2,
            "prompt": [{"role": "user", "content": f"held out {k // 2}"}],
            "completion": HOSTILE if k == 0 else f"said {step} {k}",
            "answer": "known",
            "reward": reward,
            "metrics": {},
            "completion_len": 5,
            "is_truncated": k == 1,
            "error": None if reward is not None else "TimeoutError: late",
        }
        for k, reward in enumerate(rewards)
    ]
    (folder / "results.jsonl").unlink(missing_ok=True)
    append_jsonl(folder / "results.jsonl", rows)
    (folder / "summary.json").write_text(json.dumps({"step": step, "avg@2": 0.5}))


def metric_rows(step: int) -> list[dict[str, Any]]:
    """What trainer, orchestrator and engine log in one step."""
    start = 1000.0 + 2 * step

    def span(process: str, what: str, begin: float, end: float) -> dict[str, Any]:
        named = {"timeline/what": what, "timeline/start": start + begin, "timeline/end": start + end}
        return {"step": step, "timestamp": start, "process": process, **named}

    head = {"step": step, "timestamp": start + 2}
    numbers = {"loss/mean": 0.1 / step, "entropy/mean": 1.0 / step, "mismatch_kl/mean": 0.001, "optim/lr": 1e-3}
    batch = {
        "batch/samples": 12,
        "batch/tokens": 200,
        "batch/micro_batches": 1,
        "perf/throughput": 500.0,
        "time/step": 2.0,
    }
    rewards = {
        "reward/mean": step / 20,
        "reward/alpha": step / 20,
        "reward/beta": step / 25,
        "completion_len/mean": 8.0,
    }
    counts = {"batch/async_level": 1.0, "progress/problems": 3.0, "progress/samples": 12.0}
    numbers |= off_policy_metrics(step)
    return [
        span("inference", "generate", 0.0, 0.9),
        span("trainer", "wait_for_batch", 0.0, 1.0),
        span("trainer", "forward_backward", 1.0, 1.9),
        {**head, "process": "trainer", **numbers, **batch, "optim/grad_norm": 0.5},
        {**head, "process": "orchestrator", **rewards, **counts},
    ]


def off_policy_metrics(step: int) -> dict[str, float]:
    """Ratios that spread with the age of a token, and a mismatch that grows with its position."""
    found = {"importance_ratio/mean": 1.0, "importance_ratio/max": 1.0 + step / 4, "importance_ratio/ess": 0.95}
    for age, name in enumerate(["0", "1", "2", "4_or_more"]):
        spread = 1 + age * (0.1 + step / 100)
        values = {"p05": 1 / spread, "p95": spread, "ess": 1 / spread**2}
        found |= {f"importance_ratio/staleness_{name}/{key}": value for key, value in values.items()}
    for first in (0, 16, 128, 1024):
        found[f"mismatch_kl/from_token_{first}/mean"] = 1e-6 * (1 + first) * (1 + step / 10)
    return found | {"first_mismatch/min": 3.0, "first_mismatch/median": 40.0 + step}


def sample_rows(
    rng: random.Random, step: int, groups: int = 3, size: int = 4, completion_len: int = 8
) -> list[dict[str, Any]]:
    """Rollouts of one step: one group calls tools, one rollout is hostile, one failed."""
    rows = []
    for group in range(groups):
        for index in range(size):
            output = "".join(rng.choice(LETTERS) for _ in range(completion_len))
            if group == 1:
                call = json.dumps({"name": "look_up", "arguments": {"word": HOSTILE[:9]}})
                output = f"<think>hm</think><tool_call>{call}</tool_call> done"
            requested: Any = [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": f"question {step} {group}"},
            ]
            row = _row(rng, step, group, index, requested, output)
            if (group, index) == (0, 0):
                row |= {"prompt": [{"role": "user", "content": HOSTILE}], "completion": HOSTILE, "error": HOSTILE}
                row |= {"tokens": [], "loss_mask": [], "logprobs": [], "status": "failed"}
            rows.append(row)
    return rows


def _row(rng: random.Random, step: int, group: int, index: int, requested: Any, output: str) -> dict[str, Any]:
    given = [VOCAB[c] for c in "question"]
    written = [*(VOCAB.get("\u0120" if c == " " else c, 0) for c in output), 900]
    mask = [0] * len(given) + [1] * len(written)
    logprobs = [-rng.expovariate(1) if m else 0.0 for m in mask]
    reward = round(rng.random(), 2)
    return {
        "step": step,
        "timestamp": 1000.0 + 2 * step,
        "process": "orchestrator",
        "env": "alpha" if group % 2 == 0 else "beta",
        "group_index": step * 100 + group,
        "index": index,
        "prompt": requested,
        "completion": output,
        "reward": reward,
        "advantage": reward - 0.5,
        "metrics": {"exact": 0.5},
        "status": "completed",
        "stop_reason": "stop",
        "error": None,
        "versions": [[len(given), step - 1], [len(given) + 3, step]],
        "tokens": given + written,
        "loss_mask": mask,
        "logprobs": logprobs,
        "teacher_logprobs": [lp + rng.uniform(-1, 1) if m else 0.0 for lp, m in zip(logprobs, mask, strict=True)],
        "trainer_logprobs": [lp + rng.uniform(-0.01, 0.01) if m else 0.0 for lp, m in zip(logprobs, mask, strict=True)],
    }


def index_of(run_dir: Path) -> RolloutIndex:
    """The complete index of a run."""
    index = RolloutIndex(LocalRun(run_dir))
    index.grow()
    return index
