"""Every environment under verifiers' own `vf-eval`, against the real inference server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

from cli_runner import ROOT, runner, until

from prime_rl.runtime.machine import find_free_port

FOLDERS = [path for path in (ROOT / "environments").iterdir() if (path / "pyproject.toml").is_file()]
IN_PLAIN_PYTHON = ("ifeval", "nim")
ENVIRONMENTS = sorted(path.name for path in FOLDERS if path.name not in IN_PLAIN_PYTHON)
SMALL = {
    "wiki_search": "env_args = { num_pages = 20 }\n",
    "sokoban_env": "env_args = { num_train_examples = 10, num_eval_examples = 10 }\n",
}


def is_up(url: str) -> bool:
    try:
        return urlopen(url, timeout=5).status == 200
    except OSError:
        return False


def test_vf_eval_runs_them_all(tmp_path: Path) -> None:
    port = find_free_port()
    parts = [
        f'model = "tiny-qwen3"\napi_base_url = "http://127.0.0.1:{port}/v1"\napi_key_var = "NO_KEY"\n'
        "num_examples = 2\nrollouts_per_example = 2\nmax_tokens = 12\nsave_results = true\n"
        # an untrained model may return an empty text, which verifiers treats as a failure of the server
        "sampling_args = { extra_body = { min_tokens = 8 } }\n"
    ]
    parts += [f'[[eval]]\nenv_id = "{name.replace("_", "-")}"\n' + SMALL.get(name, "") for name in ENVIRONMENTS]
    (tmp_path / "all.toml").write_text("\n".join(parts))
    folders = [str(ROOT / "environments" / name) for name in ENVIRONMENTS]
    with runner(tmp_path / "logs") as commands:
        options = ("--model.name", "tiny-qwen3", "--model.debug.random-init", "--server.port", port)
        server = commands.start("inference", *options)
        until(lambda: is_up(f"http://127.0.0.1:{port}/health"), "the server answers", server)
        done = subprocess.run(
            [sys.executable, "-m", "verifiers.scripts.eval", "all.toml"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OPENAI_API_KEY": "none"},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ENVIRONMENTS:
        [path] = tmp_path.glob(f"outputs/evals/{name.replace('_', '-')}--*/*/results.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == 4 and not [row["error"] for row in rows if row.get("error")], (name, rows)
        assert all(row["completion"] and 0 <= row["reward"] <= 2.2 for row in rows), name
