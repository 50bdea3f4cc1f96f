"""`vf-install`: `.` or `--from-local` installs an environment folder; otherwise runs the command of `verifiers`.

That command needs `uv`. Where it is absent, a name alone is installed with pip.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from prime_rl.configuration.command import exit_with_errors, show_version
from prime_rl.configuration.sections import EnvConfig
from prime_rl.envs.install import ensure_installed, install_folder
from prime_rl.runtime.redacted_output import protect_output
from rollouts.training.environments.resolve import find_environment

PASSED_ON = "verifiers.scripts.install"
USAGE = """usage: vf-install .                      install the environment in this folder, in editable form
       vf-install NAME --from-local       install the folder environments/NAME
       vf-install ARGUMENTS               the command of verifiers:

"""


def main() -> None:
    """Console script `vf-install`."""
    protect_output()
    exit_with_errors(lambda: install(sys.argv[1:]))


def install(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if "--version" in argv:
        return show_version()
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(USAGE)
    folder = find_folder(argv)
    if folder is None and len(argv) == 1 and not argv[0].startswith("-") and shutil.which("uv") is None:
        if "/" in argv[0]:
            ensure_installed(argv[0], EnvConfig().index_url)
            sys.stdout.write(f"installed {argv[0]}\n")
            return 0
        folder = find_folder([*argv, "--from-local"])
    if folder is None:
        replace_process("-m", PASSED_ON, *argv)
    install_folder(folder)
    sys.stdout.write(f"installed {folder} in editable form: changes of its files need no second installation\n")
    return 0


def find_folder(argv: Sequence[str]) -> Path | None:
    """The folder given by `PATH [--from-local]` or `NAME --from-local`; None for any other command line."""
    from_local = "--from-local" in argv
    words = [word for word in argv if word != "--from-local"]
    if len(words) != 1 or words[0].startswith("-"):
        return None
    path = Path(words[0]).expanduser()
    if words[0].startswith((".", "/", "~")):
        if not (path / "pyproject.toml").is_file():
            raise ValueError(f"{path.resolve()} has no pyproject.toml: name the folder of an environment")
        return path.resolve()
    if not from_local:
        return None
    folder = find_environment(words[0]).folder
    if folder is None:
        raise ValueError(f"{words[0]} is installed already, and no folder environments/{words[0]} was found")
    return folder


def replace_process(*argv: str) -> NoReturn:
    """Replace this process by Python with these arguments."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *argv])


if __name__ == "__main__":
    main()
