"""The logger: levels, one line per event, files without duplicates, redacted secrets, quiet libraries."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from loguru import logger

from prime_rl.configuration.sections import LogConfig
from prime_rl.utils.logger import find_level, log_failure, setup_logger

SCRIPT = """
import sys
from pathlib import Path
from loguru import logger
from prime_rl.configuration.sections import LogConfig
from prime_rl.utils.logger import setup_logger
setup_logger("trainer", LogConfig(), Path(sys.argv[1]))
logger.info("once")
"""


@pytest.fixture(autouse=True)
def _leave_no_sinks():
    yield
    logger.remove()
    logging.basicConfig(force=True)


def test_terminal_and_file_get_the_same_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logger("trainer", LogConfig(level="Warn"), tmp_path / "logs")
    logger.info("too quiet")
    logger.warning("step {} <b>of</b> {}", 1, 2)
    shown = capsys.readouterr().out
    assert shown == (tmp_path / "logs" / "trainer.log").read_text()
    (line,) = shown.splitlines()
    assert line.endswith("WARNING step 1 <b>of</b> 2") and "\033" not in line


def test_no_file_when_switched_off(tmp_path: Path) -> None:
    setup_logger("trainer", LogConfig(file=False), tmp_path / "logs")
    logger.info("x")
    assert not (tmp_path / "logs").exists()


def test_redirected_stdout_gets_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    with path.open("ab") as output:
        subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=output, check=True, timeout=60)
    assert path.read_text().count("once") == 1


def test_level_by_config_then_variable_then_info(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOGGING_LEVEL", raising=False)
    assert find_level(None) == "INFO"
    monkeypatch.setenv("LOGGING_LEVEL", "debug")
    assert find_level(None) == "DEBUG"
    assert find_level("error") == "ERROR"


def test_secrets_are_redacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-12345678")
    monkeypatch.setenv("SOME_TOKEN", "sk-12345678-longer")
    setup_logger("trainer", LogConfig(), tmp_path)
    logger.info("key sk-12345678, token {}", "sk-12345678-longer")
    assert log_failure(RuntimeError("refused sk-12345678"))
    text = capsys.readouterr().out + (tmp_path / "trainer.log").read_text()
    assert "key ***, token ***" in text and "refused ***" in text and "sk-" not in text


def test_tracebacks_go_only_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logger("trainer", LogConfig(), tmp_path)
    try:
        raise RuntimeError("deep inside")
    except RuntimeError as error:
        assert log_failure(error)
    assert capsys.readouterr().out == ""
    assert "Traceback" in (tmp_path / "trainer.log").read_text()


def test_other_libraries_log_warnings_and_above(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logger("inference", LogConfig(level="debug"))
    for name in ("httpx", "uvicorn.access", "verifiers.env"):
        logging.getLogger(name).info("chatter")
        logging.getLogger(name).warning("trouble")
    assert [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()] == [
        "WARNING httpx: trouble",
        "WARNING uvicorn.access: trouble",
        "WARNING verifiers.env: trouble",
    ]
