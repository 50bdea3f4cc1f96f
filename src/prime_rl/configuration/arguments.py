"""Commands with a few options and no configuration file: their parser, with the options that all commands have."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from prime_rl.configuration.command import exit_with_errors
from prime_rl.runtime.redacted_output import protect_output
from prime_rl.runtime.version import find_version


class CommandParser(argparse.ArgumentParser):
    """A parser with --version and --debug; errors and exit codes are those of the other commands."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, epilog=epilog, formatter_class=layout, allow_abbrev=False)
        self.add_argument("--version", action="version", version=f"prime-rl {find_version()}")
        self.add_argument("--debug", action="store_true", help="show tracebacks")

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and two lines."""
        sys.stderr.write(f"error: {message}\n  {self.prog} --help lists the options\n")
        raise SystemExit(2)

    def run(self, run: Callable[[argparse.Namespace], int | None], argv: Sequence[str] | None) -> NoReturn:
        """Parse `argv` (None: the command line) and exit with the code of `run`, as `exit_with_errors`."""
        protect_output()
        options = self.parse_args(argv)
        exit_with_errors(lambda: run(options), debug=options.debug)
