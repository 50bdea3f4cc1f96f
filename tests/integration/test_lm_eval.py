"""lm-evaluation-harness against our server: loglikelihoods over /completions, generation over /chat/completions.

lm-eval has an environment of its own: `make test-lm-eval` creates it; LM_EVAL names another command.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer

from prime_rl.runtime.tokenizer import load_tokenizer, resolve_model_dir

ROOT = Path(__file__).parents[2]
COMMAND = os.environ.get("LM_EVAL") or shutil.which(
    "lm_eval", path=f"{ROOT / '.venv-lm-eval' / 'bin'}{os.pathsep}{os.environ['PATH']}"
)
ROWS = [
    {"question": "abc", "choices": ["cba", "abc", "xyz"], "answer": 0},
    {"question": "de", "choices": ["d", "e d e"], "answer": 1},
]
CHOICE_TASK = """
task: choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: " "
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
WRITE_TASK = """
task: write
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["Q:"], max_gen_toks: 8, do_sample: false, temperature: 0.0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMMAND is None, reason="lm-eval is not installed: make test-lm-eval"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer(None)
    yield running
    running.stop()


def run_lm_eval(tmp_path: Path, task: str, model: str, model_args: dict[str, Any], *more: str) -> list[Any]:
    """The logged samples of a run over `ROWS`."""
    rows, tasks, out = tmp_path / "rows.jsonl", tmp_path / "tasks", tmp_path / "out"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tasks.mkdir()
    (tasks / "task.yaml").write_text(task.format(rows=rows))
    name = task.split("task: ")[1].split("\n")[0]
    assert COMMAND is not None
    args = [COMMAND, "run", "--model", model, "--tasks", name, "--include_path", str(tasks), "--log_samples"]
    args += ["--output_path", str(out), "--model_args", ",".join(f"{k}={v}" for k, v in model_args.items()), *more]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COVERAGE"))}
    environment |= {"NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OPENAI_API_KEY": "none"}
    done = subprocess.run(args, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    [path] = out.rglob("samples_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(1000)
def test_local_completions_scores_what_the_trainer_scores(server: RunningServer, tmp_path: Path) -> None:
    args = {"model": "tiny-qwen3", "base_url": f"{server.root}/v1/completions", "num_concurrent": 2}
    args |= {"tokenizer": resolve_model_dir("tiny-qwen3"), "tokenized_requests": False}
    samples = run_lm_eval(tmp_path, CHOICE_TASK, "local-completions", args)
    tokenizer = load_tokenizer("tiny-qwen3")
    for sample in samples:
        row = sample["doc"]
        for choice, [response] in zip(row["choices"], sample["resps"], strict=True):
            prompt = tokenizer.encode(row["question"])
            tokens = tokenizer.encode(f"{row['question']} {choice}")
            body = {"prompt": tokens, "echo": True, "logprobs": 0, "max_tokens": 0}
            answer = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]["token_logprobs"]
            assert float(response[0]) == pytest.approx(sum(answer[len(prompt) :]), abs=1e-5)
    assert len(samples) == len(ROWS)


@pytest.mark.timeout(1000)
def test_local_chat_completions_generates_what_the_server_does(server: RunningServer, tmp_path: Path) -> None:
    args = {"model": "tiny-qwen3", "base_url": f"{server.root}/v1/chat/completions", "num_concurrent": 2}
    samples = run_lm_eval(tmp_path, WRITE_TASK, "local-chat-completions", args, "--apply_chat_template")
    for sample in samples:
        messages = [{"role": "user", "content": sample["doc"]["question"]}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 8}
        text = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        assert sample["resps"] == [[text]]
    assert len(samples) == len(ROWS)
