"""Completions have the types of `openai` in processes that import it; others are spared the import."""

from __future__ import annotations

import subprocess
import sys

READ = """
import sys
{first}
import prime_rl.envs.worker
from rollouts.training.environments.answers import read_completion

for chat, choice in ((True, '{{"message": {{"content": "hi"}}}}'), (False, '{{"text": "hi"}}')):
    completion = read_completion(('{{"model": "m", "choices": [%s]}}' % choice).encode(), chat=chat)
    assert completion.model == "m" and completion.usage is None
    assert (completion.choices[0].message.content if chat else completion.choices[0].text) == "hi"
    print(type(completion).__module__.partition(".")[0], type(completion).__name__)
print("openai" in sys.modules)
"""


def read(first: str) -> list[str]:
    code = READ.format(first=first)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_worker_does_not_import_openai() -> None:
    assert read("") == ["rollouts Response"] * 2 + ["False"]


def test_code_that_imports_openai_gets_its_types() -> None:
    assert read("import openai") == ["openai ChatCompletion", "openai Completion", "True"]
