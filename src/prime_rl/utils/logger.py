"""What a process says: one readable line per event on standard output and in its log file, without secrets."""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger

if TYPE_CHECKING:
    from loguru import Record

    from prime_rl.utils.config import LogConfig

LINE = "{time:HH:mm:ss} <level>{level: >7}</level> {message}"
LEVELS = ("TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL")
SYNONYMS = {"WARN": "WARNING", "FATAL": "CRITICAL"}
LEVEL_VARIABLE = "LOGGING_LEVEL"
QUIET_LIBRARIES = ("uvicorn", "httpx", "httpcore", "openai", "verifiers", "transformers", "datasets", "asyncio")
SECRET_NAME = re.compile(r"(_KEY|_TOKEN|_SECRET)$")
MIN_SECRET_LENGTH = 6
FAILURE, FAILURE_SEVERITY = "FAILURE", 45  # between error and critical; known only where a file listens


def setup_logger(process: str, log: LogConfig, log_dir: Path | None = None, *, console: bool = True) -> None:
    """Send loguru's lines to standard output and to `<log_dir>/<process>.log`; raises ValueError for a wrong level.

    Without `console` (all ranks but the first share one terminal) only the file gets them.
    Colours only on a terminal without NO_COLOR. Nothing is written twice: where standard output already is that file
    (a launcher sent it there), the file gets the lines once. Python's own logging is passed on from warnings upwards.
    """
    level = find_level(log.level)
    logger.remove()
    logger.configure(patcher=_redact(_find_secrets()), extra={"process": process})
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    path = log_dir / f"{process}.log" if log.file and log_dir is not None else None
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if not _knows_failures():
            logger.level(FAILURE, no=FAILURE_SEVERITY)
    same = path is not None and _is_output(path)
    # diagnose would print the values of variables into tracebacks, secrets included.
    shown = None if same else _is_for_terminal
    if console or same:
        logger.add(_say, level=level, format=LINE, colorize=colours, filter=shown, diagnose=False)
    if path is not None and not same:
        logger.add(path, level=level, format=LINE, colorize=False, diagnose=False)
    _pass_on_standard_logging()


def _say(line: str) -> None:
    """To what standard output is now: a progress bar replaces it for its time, to keep lines above itself."""
    sys.stdout.write(line)
    sys.stdout.flush()


def find_level(configured: str | None) -> str:
    """The level by config, else by LOGGING_LEVEL, else INFO; raises ValueError naming a level that does not exist."""
    key, wanted = (
        ("log.level", configured) if configured else (LEVEL_VARIABLE, os.environ.get(LEVEL_VARIABLE) or "INFO")
    )
    level = SYNONYMS.get(wanted.upper(), wanted.upper())
    if level not in LEVELS:
        raise ValueError(f"{key} = {wanted!r} is not a level; choose one of {', '.join(LEVELS).lower()}")
    return level


def log_failure(error: BaseException) -> bool:
    """Write a traceback to the log file, not to the terminal; False where no file listens."""
    if not _knows_failures():
        return False
    logger.log(FAILURE, "{}", "".join(traceback.format_exception(error)).rstrip())
    return True


def _knows_failures() -> bool:
    try:
        logger.level(FAILURE)
    except ValueError:
        return False
    return True


def _is_for_terminal(record: Record) -> bool:
    return record["level"].name != FAILURE


def _is_output(path: Path) -> bool:
    """Whether standard output goes to this file."""
    try:
        return os.path.samestat(os.fstat(sys.stdout.fileno()), path.stat())
    except (OSError, ValueError):  # captured output has no descriptor
        return False


def _find_secrets() -> list[str]:
    """Values of variables such as OPENAI_API_KEY, longest first, so that one inside another leaves no rest."""
    values = {value for name, value in os.environ.items() if SECRET_NAME.search(name.upper())}
    return sorted((value for value in values if len(value) >= MIN_SECRET_LENGTH), key=len, reverse=True)


def _redact(secrets: list[str]) -> Callable[[Record], None]:
    def patch(record: Record) -> None:
        for secret in secrets:
            record["message"] = record["message"].replace(secret, "***")

    return patch


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
