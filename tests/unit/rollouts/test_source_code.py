"""The files of an environment's code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rollouts.training.environments.resolve import EnvSource, find_environment
from rollouts.training.environments.source_code import digest_code, find_code


def write(root: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        file = root / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def find(root: Path, name: str) -> list[str]:
    """Names of the files of the environment in `root / name`."""
    return [str(file.relative_to(root).with_suffix("")) for file in find_code(EnvSource("", "", file=root / name))]


def test_a_package_is_what_it_imports(tmp_path: Path) -> None:
    package = tmp_path / "my_env" / "my_env"
    texts = {"__init__": "import re\nfrom my_env.scores import f", "scores": "from .parts import g", "other": ""}
    write(package, {**texts, "parts/__init__": "from .. import more", "more": ""})
    found = find_code(find_environment(str(tmp_path / "my_env")))
    assert found == [package / f"{name}.py" for name in ("__init__", "more", "parts/__init__", "scores")]


def test_dotted_imports_are_followed(tmp_path: Path) -> None:
    """With and without `__init__.py` in the folders."""
    env = "from helpers.scores import f\nimport lib.rewards\nfrom lib import other\nimport json, os.path"
    write(tmp_path, {"my_task": env, "helpers/__init__": "", "helpers/scores": "", "lib/rewards": "", "lib/other": ""})
    write(tmp_path, {"unused": "", "lib/unused": ""})
    assert find(tmp_path, "my_task.py") == ["helpers/__init__", "helpers/scores", "lib/other", "lib/rewards", "my_task"]


def test_a_module_of_a_package_imports_from_its_root(tmp_path: Path) -> None:
    write(tmp_path, {"pkg/__init__": "", "pkg/envs/__init__": "", "pkg/envs/math": "from pkg.scoring import f"})
    write(tmp_path, {"pkg/scoring": ""})
    assert find(tmp_path, "pkg/envs/math.py") == ["pkg/__init__", "pkg/envs/math", "pkg/scoring"]


@pytest.mark.parametrize(
    ("file", "expected"), [("env.py", ["env"]), ("env/__init__.py", ["env/__init__", "env/scores"])]
)
def test_other_installed_packages_do_not_count(tmp_path: Path, file: str, expected: list[str]) -> None:
    root, text = tmp_path / "site-packages", "import torch\nfrom . import scores" if "/" in file else "import torch"
    write(root, {file.removesuffix(".py"): text, "torch/__init__": "", "env/scores": "import torch"})
    assert find(root, file) == expected


def test_a_digest_depends_on_imported_files(tmp_path: Path) -> None:
    digests = []
    for value in (1, 2, 1):
        write(tmp_path, {"env": "import scores", "scores": f"x = {value}"})
        digest_code.cache_clear()
        digests.append(digest_code(EnvSource("", "", file=tmp_path / "env.py")))
    assert digests[0] == digests[2] != digests[1]
