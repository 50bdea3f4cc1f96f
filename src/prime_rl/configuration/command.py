"""Command-line entry points: parse the arguments, run the command, map errors to exit codes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from prime_rl.configuration.errors import ConfigError, find_cause
from prime_rl.runtime.interrupts import end_on_signals, report_interrupt, unwind_on_signals, was_interrupted
from prime_rl.runtime.process_tree import TOKEN_VARIABLE
from prime_rl.runtime.redacted_output import protect_output
from prime_rl.runtime.redaction import register_config
from prime_rl.runtime.run_dir import RunDir, find_used, lock_output_dir

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
    check: Callable[[Any], None] = lambda _: None,
    record: Callable[[Any], BaseConfig | None] = lambda _: None,
    writes: Callable[[Any], bool] = lambda _: True,
    locks: Callable[[Any], str | None] = lambda _: None,
) -> NoReturn:
    """Run a command and exit with 0 (success), 2 (`ValueError`: invalid input) or 1 (failure).

    `config_cls` is the config class that `run` takes, or its location as "module:name", imported when needed.
    `explain` returns comment lines that --dry-run prints before the values; `preview` returns text printed instead of
    them. `check` raises `ValueError` for a start that is refused, before anything is recorded. `record` returns the
    config to write to `<output_dir>/configs/<prog>.toml`, if any. `writes`: whether the command writes to `output_dir`,
    which is then created. `locks` returns the part of it that no other process may write; a process that a launcher
    starts leaves the lock to it.
    """
    protect_output()
    argv = sys.argv[1:]
    if "--version" in argv:
        raise SystemExit(show_version())
    debug, dry_run = "--debug" in argv, "--dry-run" in argv
    wants_help, topic, argv = _split_help([word for word in argv if word not in ("--debug", "--dry-run")])

    def execute() -> int | None:
        if wants_help:
            return _show_help(prog, config_cls, argv, summary, topic)
        from prime_rl.utils.pydantic_config import parse_argv

        config, _ = parse_argv(_load(config_cls), argv, prog)
        register_config(config.model_dump())
        for line in (
            () if TOKEN_VARIABLE in os.environ else config.notes
        ):  # a launcher has printed those of its children
            sys.stderr.write(f"{line}\n")
        # Child processes get their part of the config as a file, so they must not read the variables again.
        for source in {source for source in config.provenance.values() if source.startswith("env ")}:
            os.environ.pop(source.removeprefix("env "), None)
        if dry_run:
            from prime_rl.configuration.render import render_toml

            if (text := preview(config)) is not None:
                sys.stdout.write(text)
                return 0
            comments = "".join(f"# {line}\n" for line in explain(config))
            sys.stdout.write(comments + render_toml(config, config.provenance))
            return 0
        if writes(config):
            _check_output_dir(config)
        with _lock(config, locks(config)):
            check(config)
            if (recorded := record(config)) is not None:
                _record(recorded, prog)
            return run(config)

    exit_with_errors(execute, debug=debug)


def exit_with_errors(run: Callable[[], int | None], *, debug: bool = False) -> NoReturn:
    """Exit with the code of `run`, or with a message: 2 for `ValueError`, 130 or 143 for a signal, else 1.

    `debug`: a traceback.
    """
    if TOKEN_VARIABLE not in os.environ:  # a launcher ends its children itself
        end_on_signals()
    try:
        with unwind_on_signals():
            raise SystemExit(run() or 0)
    except KeyboardInterrupt as stop:
        raise SystemExit(report_interrupt(stop)) from None
    except BrokenPipeError:
        # The reader of stdout (a pager, head) exited; prevent a second error when Python flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except Exception as error:
        if was_interrupted():  # a library has wrapped the interrupt
            raise SystemExit(report_interrupt(KeyboardInterrupt())) from None
        if debug:
            raise
        raise SystemExit(_show_error(error)) from None


def _load(config_cls: type[BaseConfig] | str) -> type[BaseConfig]:
    if not isinstance(config_cls, str):
        return config_cls
    module, _, name = config_cls.partition(":")
    cls: type[BaseConfig] = getattr(importlib.import_module(module), name)
    return cls


def show_version() -> int:
    """Print the version of the package; returns the exit code."""
    from prime_rl.runtime.version import find_version

    sys.stdout.write(f"prime-rl {find_version()}\n")
    return 0


def _split_help(argv: Sequence[str]) -> tuple[bool, str | None, list[str]]:
    """Whether help is wanted, its topic (the word behind --help), and the other words."""
    start = next((i for i, word in enumerate(argv) if word in ("--help", "-h")), None)
    if start is None:
        return False, None, list(argv)
    rest = list(argv[start + 1 :])
    topic = rest.pop(0) if rest and not rest[0].startswith(("-", "@")) else None
    return True, topic, [*argv[:start], *(word for word in rest if word not in ("--help", "-h"))]


def _show_help(
    prog: str, config_cls: type[BaseConfig] | str, argv: Sequence[str], summary: str, topic: str | None
) -> int:
    """Print the help, with the merged values if any were given; return the exit code."""
    from prime_rl.configuration.help import is_given, render_help
    from prime_rl.utils.pydantic_config import parse_argv

    cls = _load(config_cls)
    config, problem = None, None
    try:
        config, _ = parse_argv(cls, argv, prog)
    except ConfigError as error:
        problem = error if argv else None
    # Without any input, show the declared defaults rather than values derived by validators.
    shown = config if config and any(map(is_given, config.provenance.values())) else None
    sys.stdout.write(_colorize(render_help(prog, cls, shown, summary, topic) + "\n"))
    return _show_error(problem) if problem else 0


def _colorize(text: str) -> str:
    """Print section titles in bold on a terminal unless NO_COLOR is set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return "\n".join(f"\033[1m{line}\033[0m" if line[:1] == "[" else line for line in text.split("\n"))


def _check_output_dir(config: BaseConfig) -> None:
    """Raise `ValueError` for an `output_dir` that cannot be written, before anything starts."""
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


def _lock(config: Any, part: str | None) -> AbstractContextManager[None]:
    """Lock a part of `output_dir`, unless a launcher has locked it for this process."""
    if part is None or TOKEN_VARIABLE in os.environ:
        return nullcontext()
    return lock_output_dir(config.output_dir, part)


def _record(config: BaseConfig, prog: str) -> None:
    """Record a resolved config, unless its values were read from that file (whose source comments are more precise).

    What a launcher adds to the file that it has written, such as the number of ranks, is not recorded.
    """
    from prime_rl.utils.pydantic_config import write_record

    out_dir = config.model_dump(include={"output_dir"})["output_dir"]
    run = RunDir(Path(out_dir).resolve())
    path, sources = run.config(prog), (config.provenance[key] for key in config.given or ())
    is_read = path in {Path(source.rpartition(":")[0]).resolve() for source in set(sources)}
    if is_read and (TOKEN_VARIABLE in os.environ or _is_recorded(config, path)):
        return
    if TOKEN_VARIABLE in os.environ:  # the file there is of this start, too: its launcher has written it
        write_record(config, path)
    else:
        record_config(config, run, prog)


def record_config(config: BaseConfig, run: RunDir, process: str) -> None:
    """Write `configs/<process>.toml`; that of a run with checkpoints is moved to `attempts/N` if its settings differ.

    A resume may be refused only once the checkpoint is loaded, with the advice to use the original settings.
    """
    from prime_rl.utils.pydantic_config import write_record

    path = run.config(process)
    if path.exists() and find_used([run.checkpoints]) and not _is_recorded(config, path):
        sys.stdout.write(f"note: {path.name} of an earlier start moved to {run.archive([path])}\n")
    write_record(config, path)


def _is_recorded(config: BaseConfig, path: Path) -> bool:
    """Whether the file has these settings."""
    from prime_rl.configuration.render import render_toml

    text = render_toml(config, config.provenance, config.given)
    return _read_values(path.read_text(encoding="utf-8", errors="replace")) == _read_values(text)


def _read_values(text: str) -> dict[str, Any] | None:
    """The values of a record but `resume`, in which a run and its continuation always differ; None if it is no TOML."""
    import tomllib

    try:
        return {key: value for key, value in tomllib.loads(text).items() if key != "resume"}
    except tomllib.TOMLDecodeError:
        return None


def _show_error(error: BaseException) -> int:
    error = find_cause(error)
    if isinstance(error, ValueError):
        problems = error.problems if isinstance(error, ConfigError) else (str(error),)
        for problem in problems:
            sys.stderr.write("\n".join(f"error: {problem}".splitlines()[:3]) + "\n")
        return 2
    # The logger is loaded only if the command got as far as setting it up.
    logger = sys.modules.get("prime_rl.utils.logger")
    where = "in the log file, or with --debug" if logger and logger.log_failure(error) else "with --debug"
    sys.stderr.write(f"error: {str(error) or type(error).__name__}\n  ({type(error).__name__}; traceback {where})\n")
    return 1
