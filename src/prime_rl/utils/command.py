"""The life of a command: read its arguments, run it, exit with a code; a plain --help takes no configuration at all."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from prime_rl.utils.help_page import colour, keep_page, read_page
from prime_rl.utils.variables import configuring

if TYPE_CHECKING:
    from prime_rl.utils.pydantic_config import BaseConfig


def run_command(
    prog: str,
    config_cls: type[BaseConfig] | str,
    run: Callable[[Any], int | None],
    *,
    summary: str,
    explain: Callable[[Any], list[str]] = lambda _: [],
    preview: Callable[[Any], str | None] = lambda _: None,
    record: bool = False,
) -> NoReturn:
    """A command's whole life: exits with 0 (good), 2 (wrong input) or 1 (failed).

    `config_cls` is the class of the configuration that `run` takes, or where it is, as "module:name": then --help
    alone shows the page kept from the last time, and imports nothing. `explain` gives lines that --dry-run shows
    before the values, as comments; `preview` gives text that it shows in their place. With `record` the values are
    written to `<output_dir>/configs/<prog>.toml`.
    """
    argv = sys.argv[1:]
    debug, wants_help, dry_run = "--debug" in argv, "--help" in argv or "-h" in argv, "--dry-run" in argv
    argv = [word for word in argv if word not in ("--debug", "--help", "-h", "--dry-run")]
    try:
        if wants_help:
            raise SystemExit(_show_help(prog, config_cls, argv, summary))
        from prime_rl.utils.pydantic_config import parse_argv

        config, _ = parse_argv(_load(config_cls), argv, prog)
        for text in config.notes:
            sys.stderr.write(f"{text}\n")
        # Processes that this one starts get their part of the config as a file; variables must not reach them again.
        for source in {source for source in config.provenance.values() if source.startswith("env ")}:
            os.environ.pop(source.removeprefix("env "), None)
        if dry_run:
            from prime_rl.utils.config_toml import render_toml

            if (files := preview(config)) is not None:
                sys.stdout.write(files)
                raise SystemExit(0)
            comments = "".join(f"# {line}\n" for line in explain(config))
            sys.stdout.write(comments + render_toml(config, config.provenance))
            raise SystemExit(0)
        _check_output_dir(config)
        if record:
            _record(config, prog)
        raise SystemExit(run(config) or 0)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader of our output (a pager, head) has gone; Python must not complain about it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except Exception as error:
        if debug:
            raise
        raise SystemExit(_show_error(error)) from None


def _load(config_cls: type[BaseConfig] | str) -> type[BaseConfig]:
    if not isinstance(config_cls, str):
        return config_cls
    module, _, name = config_cls.partition(":")
    found: type[BaseConfig] = getattr(importlib.import_module(module), name)
    return found


def _show_help(prog: str, config_cls: type[BaseConfig] | str, argv: Sequence[str], summary: str) -> int:
    """Print the help, with the merged values where there are any; returns the exit code."""
    plain = isinstance(config_cls, str) and not argv and not configuring(os.environ)
    if plain and (page := read_page(prog)) is not None:
        sys.stdout.write(colour(page))
        return 0
    from prime_rl.utils.config_errors import ConfigError
    from prime_rl.utils.config_help import render_help
    from prime_rl.utils.pydantic_config import parse_argv

    found = _load(config_cls)
    config, problem = None, None
    try:
        config, _ = parse_argv(found, argv, prog)
    except ConfigError as error:
        problem = error if argv else None
    # Without files, options and variables the defaults say more than what validators made of them.
    given = config and any(not source.startswith("shared key") for source in config.provenance.values())
    page = render_help(prog, found, config if given else None, summary) + "\n"
    sys.stdout.write(colour(page))
    if plain:
        keep_page(prog, page)
    return _show_error(problem) if problem else 0


def _check_output_dir(config: BaseConfig) -> None:
    """A directory that cannot be written is told before anything starts, by its key."""
    path = getattr(config, "output_dir", None)
    if not isinstance(path, Path):
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(path, os.W_OK | os.X_OK) else "no permission to write there"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason is not None:
        raise ValueError(f"output_dir {path} cannot be written ({reason}): choose another --output-dir")


def _record(config: BaseConfig, prog: str) -> None:
    """Write what a command runs with, unless it was read from that very file: the sources in there say more."""
    from prime_rl.utils.pydantic_config import write_config

    out_dir = config.model_dump(include={"output_dir"})["output_dir"]
    path = Path(out_dir).resolve() / "configs" / f"{prog}.toml"
    files = {Path(source.rpartition(":")[0]) for source in config.provenance.values() if ":" in source}
    if path not in {file.resolve() for file in files}:
        write_config(config, path)


def _show_error(error: BaseException) -> int:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    if isinstance(error, ValueError):
        sys.stderr.write("\n".join(f"error: {error}".splitlines()[:3]) + "\n")
        return 2
    # The logger is there only if the command got as far as setting it up.
    logger = sys.modules.get("prime_rl.utils.logger")
    where = "in the log file, or with --debug" if logger and logger.log_failure(error) else "with --debug"
    sys.stderr.write(f"error: {str(error) or type(error).__name__}\n  ({type(error).__name__}; traceback {where})\n")
    return 1
