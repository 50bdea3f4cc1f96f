"""Logging: one redacted line per event on standard output and in the log file of the process."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger

from prime_rl.runtime.redacted_output import RedactedStream, is_log_pipe
from prime_rl.runtime.redaction import redact, refresh_secrets

if TYPE_CHECKING:
    from loguru import Record

    from prime_rl.configuration.sections import LogConfig

LINE = "{time:HH:mm:ss} <level>{level: >7}</level> {message}"
LEVELS = ("TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL")
SYNONYMS = {"WARN": "WARNING", "FATAL": "CRITICAL"}
LEVEL_VARIABLE = "LOGGING_LEVEL"
QUIET_LIBRARIES = ("uvicorn", "httpx", "httpcore", "openai", "verifiers", "transformers", "datasets", "asyncio")
FAILURE, FAILURE_SEVERITY = "FAILURE", 45  # between error and critical; registered only with a log file


def setup_logger(process: str, log: LogConfig, log_dir: Path | None = None, *, console: bool = True) -> None:
    """Log to standard output and to `<log_dir>/<process>.log`; raises ValueError for an invalid level.

    Without `console` (all ranks but rank 0) only the file is written. Colors are used on a terminal without NO_COLOR.
    If standard output is already redirected to that file (by a launcher), lines are written once. Warnings and above of
    Python's logging are forwarded.
    """
    level = find_level(log.level)
    logger.remove()
    refresh_secrets()
    logger.configure(extra={"process": process})
    colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    path = log_dir / f"{process}.log" if log.file and log_dir is not None else None
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if not _has_failure_level():
            logger.level(FAILURE, no=FAILURE_SEVERITY)
    same = path is not None and _is_output(path)
    # diagnose would print the values of variables into tracebacks, secrets included.
    shown = None if same else _is_for_terminal
    if console or same:
        logger.add(_write_line, level=level, format=LINE, colorize=colors, filter=shown, diagnose=False)
    if path is not None and not same:
        file = _LogFile(path.open("a", encoding="utf-8"))
        logger.add(file, level=level, format=LINE, colorize=False, diagnose=False)
    _pass_on_standard_logging()


def _write_line(line: str) -> None:
    """Write to the current standard output, which a progress bar may replace to print lines above itself."""
    sys.stdout.write(redact(line))
    sys.stdout.flush()


def find_level(configured: str | None) -> str:
    """The level of the config, else of LOGGING_LEVEL, else INFO; raises ValueError for an unknown level."""
    key, wanted = (
        ("log.level", configured) if configured else (LEVEL_VARIABLE, os.environ.get(LEVEL_VARIABLE) or "INFO")
    )
    level = SYNONYMS.get(wanted.upper(), wanted.upper())
    if level not in LEVELS:
        raise ValueError(f"{key} = {wanted!r} is not a level; choose one of {', '.join(LEVELS).lower()}")
    return level


def log_failure(error: BaseException) -> bool:
    """Write a traceback to the log file, not to the terminal; False where no file listens."""
    if not _has_failure_level():
        return False
    logger.log(FAILURE, "{}", "".join(traceback.format_exception(error)).rstrip())
    return True


def _has_failure_level() -> bool:
    try:
        logger.level(FAILURE)
    except ValueError:
        return False
    return True


def _is_for_terminal(record: Record) -> bool:
    return record["level"].name != FAILURE


def _is_output(path: Path) -> bool:
    """Whether standard output goes to this file, directly or through the launcher's redacting pipe."""
    if is_log_pipe(sys.stdout, path):
        return True
    try:
        return os.path.samestat(os.fstat(sys.stdout.fileno()), path.stat())
    except (OSError, ValueError):  # captured output has no descriptor
        return False


class _LogFile(RedactedStream):
    """A log file that loguru closes when the sink is removed."""

    def stop(self) -> None:
        """Close the file."""
        self._stream.close()


class _Handler(logging.Handler):
    """Hands records of Python's logging to loguru."""

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname if record.levelname in LEVELS else record.levelno
        logger.opt(exception=record.exc_info).log(level, f"{record.name}: {record.getMessage()}")


def _pass_on_standard_logging() -> None:
    logging.basicConfig(handlers=[_Handler()], level=logging.WARNING, force=True)
    for name in [*QUIET_LIBRARIES, *(f"uvicorn.{part}" for part in ("error", "access"))]:
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
        library.setLevel(logging.WARNING)
