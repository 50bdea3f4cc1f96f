"""`rl init NAME`: files of a new environment that trains at the first try."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Sequence
from pathlib import Path

TEMPLATES = Path(__file__).resolve().parents[1] / "assets" / "new_environment"
TEMPLATE_NAME = "my_task"
USAGE = """\
usage: rl init NAME

Write environments/NAME/ below the working directory: an environment, a configuration of rl, and a test.
"""


def init(argv: Sequence[str]) -> int:
    """Write the files and print the next commands; returns the exit code. Raises `ValueError` for invalid input."""
    if "--help" in argv or "-h" in argv:
        sys.stdout.write(USAGE)
        return 0
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ValueError("rl init takes one name: write `rl init my_task`")
    folder = write_environment(argv[0], Path.cwd())
    name, where = folder.name, folder.relative_to(Path.cwd())
    commands = {
        f"python -m pytest {where}": "test the rewards",
        f"rl @ {where}/rl.toml": "train an untrained model of 0.4M parameters on a CPU",
        f"monitor outputs/{name} --open": "look at its curves and rollouts",
    }
    width = max(map(len, commands))
    sys.stdout.write(f"wrote {', '.join(sorted(file.name for file in folder.iterdir()))} to {where}\n")
    sys.stdout.writelines(f"  {command:<{width}}   {purpose}\n" for command, purpose in commands.items())
    return 0


def write_environment(name: str, root: Path) -> Path:
    """Write `environments/<name>/` below `root`; returns the folder. `ValueError` for an existing or invalid name."""
    module = name.replace("-", "_")
    if not module.isidentifier() or keyword.iskeyword(module) or module != module.lower():
        raise ValueError(f"{name!r} cannot be a module: use lower-case letters, digits and underscores, as in my_task")
    if module in sys.stdlib_module_names:
        raise ValueError(f"{name!r} is a module of Python: choose another name")
    folder = root / "environments" / module
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(f"{folder} exists: choose another name, or remove it") from None
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error.strerror}): go to another directory") from None
    targets = {
        "environment.py": f"{module}.py",
        "test_environment.py": f"test_{module}.py",
        "rl.toml": "rl.toml",
        "pyproject.toml": "pyproject.toml",
    }
    for source, target in targets.items():
        text = (TEMPLATES / f"{source}.template").read_text(encoding="utf-8")
        text = text.replace(TEMPLATE_NAME, module).replace(TEMPLATE_NAME.replace("_", "-"), module.replace("_", "-"))
        (folder / target).write_text(text, encoding="utf-8")
    return folder
