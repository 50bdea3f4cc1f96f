"""Redaction of secrets: which values, in which encodings, in streams cut anywhere, and in every file of a run."""

from __future__ import annotations

import base64
import html
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote, quote_plus

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.generation.resume_log import to_result
from prime_rl.orchestrator.rollout_manager import GroupGenerator
from prime_rl.runtime import redaction
from prime_rl.runtime.process import Supervisor
from prime_rl.runtime.redacted_output import RedactedStream, StreamRedactor, plain_output, protect_output
from prime_rl.runtime.redaction import Redactor, is_secret_value, redact, redact_fields, register_config
from prime_rl.utils.monitor import build_monitor
from rollouts.training.agent_integration import Rollout
from rollouts.training.types import Sample

SECRET = 's3cr3t/"é+&<=>\\t0ken'
DIGITS = "73310497"


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FOO_TOKEN", SECRET)
    monkeypatch.setenv("PIN_PASS", DIGITS)
    monkeypatch.setattr(redaction, "_variables", set())
    monkeypatch.setattr(redaction, "_values", set())
    redaction.refresh_secrets()
    yield
    redaction.refresh_secrets()


ENCODINGS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "bearer": lambda value: f"Authorization: Bearer {value}",
    "json": json.dumps,
    "json-utf8": lambda value: json.dumps(value, ensure_ascii=False),
    "repr": repr,
    "html": html.escape,
    "url": quote,
    "url-all": lambda value: quote(value, safe=""),
    "url-plus": quote_plus,
    "url-lower": lambda value: quote(value, safe="").lower(),
    "hex": lambda value: value.encode().hex(),
    "hex-upper": lambda value: value.encode().hex().upper(),
    **{
        f"{name} after {count}": lambda value, count=count, encode=encode: encode(
            b"u" * count + value.encode() + b"."
        ).decode()
        for count in range(3)
        for name, encode in (("base64", base64.b64encode), ("base64-url", base64.urlsafe_b64encode))
    },
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding_of_a_secret_is_removed(name: str) -> None:
    shown = redact(f"before {ENCODINGS[name](SECRET)} after")
    assert shown.startswith("before ") and shown.endswith(" after") and "***" in shown
    rest = shown.removeprefix("before ").removesuffix(" after").replace("***", "")
    assert len(rest) <= len(ENCODINGS[name]("")) + 4, "what surrounds the secret, and half characters of base64"


@pytest.mark.parametrize("name", ["A_KEY", "hf_token", "X_SECRET", "DB_PASSWORD", "A_PASS", "A_CREDENTIALS", "TOKEN"])
def test_variables_named_like_secrets_hold_secrets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "value-of-it-42")
    redaction.refresh_secrets()
    assert redact("a value-of-it-42 b") == "a *** b"


def test_common_values_are_not_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for value in ("EMPTY", "1234567", "xxxxxxxxxxxx", "changeme", "password", str(tmp_path)):
        assert not is_secret_value(value)
    monkeypatch.setenv("MONKEY", "not-a-secret-name")
    redaction.refresh_secrets()
    line = "step 3 EMPTY not-a-secret-name"
    assert redact(line) is line, "a line without secrets is not copied"


def test_secrets_named_and_held_by_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_LOGIN", "login-value-99")
    register_config(
        {
            "client": {"api_key_var": "MY_LOGIN", "headers": {"Authorization": "Bearer header-value-7"}},
            "env": [{"args": {"api_key": "argument-value-5"}}],
        }
    )
    assert redact("login-value-99 header-value-7 argument-value-5 MY_LOGIN") == "*** *** *** MY_LOGIN"


def test_lines_of_a_private_key_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLS_KEY", "-----BEGIN KEY-----\nMIIabcdefgh1\nQzIxyzuvw987\n-----END KEY-----\n")
    redaction.refresh_secrets()
    assert redact("  | MIIabcdefgh1\n  | QzIxyzuvw987") == "  | ***\n  | ***"


def test_numbers_are_never_changed() -> None:
    row = {"tokens": [int(DIGITS), 1], "loss": float(DIGITS), "text": DIGITS, "rows": [[1, f"x {DIGITS}", None]]}
    assert redact_fields(row) == {**row, "text": "***", "rows": [[1, "x ***", None]]}
    assert redact_fields({DIGITS: {"k": (SECRET,)}}) == {"***": {"k": ["***"]}}


# Streams


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_secret_cut_between_reads_is_removed(size: int) -> None:
    data = f"a {SECRET} b {SECRET}{SECRET} {SECRET[:9]} end {SECRET[:5]}".encode()
    stream = StreamRedactor()
    pieces = [stream.feed(data[i : i + size]) for i in range(0, len(data), size)]
    whole = b"".join([*pieces, stream.close()])
    assert whole.decode() == f"a *** b ****** {SECRET[:9]} end {SECRET[:5]}"


@given(
    st.lists(st.sampled_from([b"abcdefgh1", b"abcdefgh1-long", b"bcdefgh1", b"abc", b"-l", b"x", b"\n"]), max_size=30)
)
def test_split_streams_equal_whole_text(pieces: list[bytes]) -> None:
    redactor = Redactor(["abcdefgh1", "abcdefgh1-long"])
    done, held = b"", b""
    for piece in pieces:
        part, held = redactor.split(held + piece)
        done += part
    assert done + redactor.redact_bytes(held) == redactor.redact_bytes(b"".join(pieces))


def test_lines_are_passed_on_at_once() -> None:
    stream = StreamRedactor()
    assert stream.feed(b"step 1\n") == b"step 1\n" and stream.feed(b"50%\r") == b"50%\r"


def test_python_output_is_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    protect_output()
    protect_output()
    assert isinstance(sys.stdout, RedactedStream) and sys.stdout.isatty() is False
    print("x", SECRET)
    with plain_output():
        assert sys.stdout is out
    try:
        raise RuntimeError(SECRET)
    except RuntimeError:
        sys.excepthook(*sys.exc_info())
    assert out.getvalue() == "x ***\n"
    assert "RuntimeError: ***" in err.getvalue() and SECRET not in err.getvalue()


def test_logs_of_a_launcher_hold_no_secrets(tmp_path: Path) -> None:
    """For Python output, also in two pieces, child processes and tracebacks."""
    code = """
import os, subprocess, sys, time
secret = os.environ["FOO_TOKEN"]
print("first", secret, flush=True)
for piece in ("cut ", secret[:7], secret[7:], "\\n"):
    os.write(1, piece.encode()); time.sleep(0.05)
subprocess.run([sys.executable, "-c", "import os; print('child', os.environ['FOO_TOKEN'])"])
raise RuntimeError(secret)
"""
    console = io.StringIO()
    with (
        pytest.raises(RuntimeError, match="exit code 1"),
        Supervisor(tmp_path, console=console, handle_signals=False) as supervisor,
    ):
        supervisor.start("work", [sys.executable, "-c", code])
        supervisor.wait(["work"])
    log = (tmp_path / "work.log").read_text()
    assert SECRET not in log + console.getvalue()
    assert all(line in log for line in ("first ***\n", "cut ***\n", "child ***\n", "RuntimeError: ***\n"))


# Records


def test_samples_and_metrics_hold_no_secrets(tmp_path: Path) -> None:
    monitor = build_monitor(tmp_path, "orchestrator")
    messages = [{"role": "user", "content": f"use {SECRET}"}]
    monitor.log_samples([{"prompt": messages, "error": SECRET, "tokens": [int(DIGITS)], "advantage": 0.5}], 1)
    monitor.log({f"reward/{SECRET}": 1.0}, 1)
    text = (tmp_path / "samples.jsonl").read_text() + (tmp_path / "metrics.jsonl").read_text()
    assert json.dumps(SECRET)[1:-1] not in text and SECRET.split('"')[0] not in text
    assert f'"tokens":[{DIGITS}]' in text and '"content":"use ***"' in text and '"reward/***":1.0' in text


def test_batches_hold_no_secrets_and_the_same_tokens() -> None:
    metadata = {"chat_request": {"prompt": SECRET}, "completion": [{"content": SECRET}], "env": "e"}
    sample = Sample(prompt=SECRET, response=SECRET, error=SECRET, tokens=[int(DIGITS)], metadata=metadata)
    [sample] = anyio.run(GroupGenerator._add_teacher_logprobs, SimpleNamespace(teacher=None), 0, [sample], {}, None)
    assert (sample.prompt, sample.response, sample.error, sample.tokens) == ("***", "***", "***", [int(DIGITS)])
    assert sample.metadata == {"completion": [{"content": "***"}], "env": "e"}


def test_results_of_evaluations_hold_no_secrets() -> None:
    rollout = Rollout(
        prompt=f"p {SECRET}",
        completion=[{"role": "assistant", "content": SECRET}],
        answer={"key": SECRET},
        error=SECRET,
        error_type="KeyError",
        reward=1.0,
    )
    result = to_result(rollout, 0)
    assert SECRET.split('"')[0] not in msgspec.json.encode(result).decode()
    assert (result.prompt, result.error, result.answer) == ("p ***", "KeyError: ***", {"key": "***"})


HANG = """
import os, signal, sys
from pathlib import Path
from loguru import logger
from prime_rl.runtime.hang_watchdog import WaitStatus, explain_on_signal
secret = os.environ["FOO_TOKEN"]
explain_on_signal("work", Path(sys.argv[1]), lambda: WaitStatus(f"waits for {secret}", None, 1.0, {"queue": [secret]}))
logger.info(secret)
os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_hang_reports_hold_no_secrets(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", HANG, str(tmp_path)], check=True, timeout=60, capture_output=True)
    text = (tmp_path / "hang" / "work.json").read_text()
    assert "waits for ***" in text and SECRET.split('"')[0] not in text


EVALUATION = """
import os
def load_environment():
    secret = os.environ["FOO_TOKEN"]
    print("loading", secret, flush=True)
    os.system("env | grep FOO_TOKEN")
    def reward(row, completion):
        print("scoring", secret, flush=True)
        return 1.0 if row["answer"] == "good" else {}[secret]
    rows = [{"prompt": name + " " + secret, "answer": name} for name in ("good", "bad")]
    return {"dataset": rows, "rewards": reward}
"""


def test_no_output_of_an_evaluation_holds_a_secret(tmp_path: Path) -> None:
    """The environment prints, shells out, raises, and puts the secret into its rows."""
    from fake_engine import FakeEngine, serve

    (tmp_path / "leaky.py").write_text(EVALUATION)
    with serve(FakeEngine(reply=lambda body: os.environ["FOO_TOKEN"])) as engine:
        argv = [sys.executable, "-m", "prime_rl.eval.eval", "--model.name", "m", "--client.base-url", engine.base_url]
        argv += ["--env", json.dumps([{"id": f"{tmp_path}/leaky.py", "name": "leaky"}]), "--output-dir"]
        done = subprocess.run([*argv, str(tmp_path / "out")], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert "loading ***" in shown and "FOO_TOKEN=***" in shown and "scoring ***" in shown
    assert any(path.name == "results.jsonl" for path in files)
    part = SECRET.split('"')[0]
    leaks = [path.name for path in files if part in path.read_bytes().decode(errors="replace")]
    assert part not in shown and leaks == []


WANDB = """
import os, sys
from pathlib import Path
from prime_rl.configuration.sections import TrackersConfig, WandbConfig
from prime_rl.utils.monitor import build_monitor
from prime_rl.runtime.redacted_output import protect_output
protect_output()
monitor = build_monitor(Path(sys.argv[1]), "trainer", TrackersConfig(wandb=WandbConfig(offline=True)))
print("printed", os.environ["FOO_TOKEN"], flush=True)
monitor.log_samples([{"prompt": os.environ["FOO_TOKEN"], "completion": "c", "reward": 1.0}], 1)
monitor.finish()
"""


def test_wandb_gets_no_secrets(tmp_path: Path) -> None:
    """Neither in tables nor in the console output that it records."""
    pytest.importorskip("wandb", reason="pip install wandb to run this")
    environ = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"}
    argv = [sys.executable, "-c", WANDB, str(tmp_path)]
    done = subprocess.run(argv, env=environ, check=True, timeout=100, capture_output=True, text=True)
    assert "printed ***" in done.stdout
    files = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file() and not path.is_symlink()]
    contents = {path.name: path.read_bytes().decode(errors="replace") for path in files}
    assert [name for name, text in contents.items() if SECRET.split('"')[0] in text] == []
    assert any("printed ***" in text for text in contents.values())
