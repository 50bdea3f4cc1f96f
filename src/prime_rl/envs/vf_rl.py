"""`vf-rl`: `@ FILE` of a nanochat run starts `scripts.prime_rl_train`; otherwise runs the command of `verifiers`."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prime_rl.configuration.command import exit_with_errors, show_version
from prime_rl.envs.vf_install import replace_process
from prime_rl.runtime.redacted_output import protect_output

THEIRS = "import sys; sys.argv[0] = 'vf-rl'; from verifiers.scripts.rl import main; main()"
"""Their module has a function but no script."""
TRAINER = "scripts.prime_rl_train"
USAGE = """usage: vf-rl @ FILE.toml

Train a nanochat model by FILE.toml: runs scripts.prime_rl_train, see docs/nanochat.md.
Any other arguments are those of `vf-rl` of the package verifiers-rl, if it is installed.
"""


def main() -> None:
    """Console script `vf-rl`."""
    protect_output()
    exit_with_errors(lambda: run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run the command: --version and --help here, everything else in another program that replaces this process."""
    if "--version" in argv:
        return show_version()
    if not argv or {"--help", "-h"} & set(argv):
        sys.stdout.write(USAGE)
        return 0
    if not is_ours(argv):
        replace_process("-c", THEIRS, *argv)
    root = find_checkout()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    replace_process("-m", TRAINER, *argv)


def is_ours(argv: Sequence[str]) -> bool:
    """Whether the command line has a TOML file with a nanochat model, or with none, which `verifiers` requires."""
    words = [word.removeprefix("@") for word in argv if word.lstrip("@").endswith(".toml")]
    if not words or not any(word.startswith("@") for word in argv):
        return False
    path = Path(words[0]).expanduser()
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    return "model" not in table or str(table["model"]).startswith("nanochat-")


def find_checkout() -> Path:
    """The repository with the scripts: found from the working directory or the location of this package."""
    roots = [Path.cwd(), *Path.cwd().parents, *Path(__file__).resolve().parents]
    for root in roots:
        if (root / "scripts" / "prime_rl_train.py").is_file():
            return root
    raise ValueError("scripts/prime_rl_train.py was not found: run vf-rl in a checkout of the repository")


if __name__ == "__main__":
    main()
