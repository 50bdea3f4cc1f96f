"""The parent's side of one environment worker process: start, load, rows, memory, end."""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from prime_rl.envs.worker import (
    LEAVE_S,
    Finished,
    Heartbeat,
    Load,
    Loaded,
    RowsReply,
    RowsRequest,
    decode_finished,
    encode,
)
from prime_rl.runtime.framing import FrameChannel, receive_frame, send_frame
from prime_rl.runtime.process_tree import TOKEN_VARIABLE, add_token, kill_run_processes
from prime_rl.runtime.redacted_output import copy_redacted
from rollouts.training.agent_integration import Rollout

if TYPE_CHECKING:
    from prime_rl.configuration.sections import EnvConfig

LOAD_TIMEOUT_S = 600.0


class WorkerDied(RuntimeError):
    """A worker exited before it had loaded the environment or sent its rows."""


class GroupFailure(msgspec.Struct):
    """A group ended without rollouts: its code raised, or its worker was lost. `charged`: its own code may be the
    cause."""

    error_type: str
    error: str
    charged: bool


class WorkerProcess:
    """One process and its assigned groups; it starts at once and loads the environment."""

    def __init__(self, config: EnvConfig, score: bool) -> None:
        self.name = config.display_name
        self.ready = self.draining = False
        self.pending: dict[int, asyncio.Future[list[Rollout] | GroupFailure]] = {}
        self.channel: FrameChannel | None = None
        self._beats, self._beat_seen = -1, time.monotonic()
        self.builds_prompts = self.scores_groups = False
        self.leave_s = LEAVE_S
        self._token = secrets.token_hex(8)
        paths = os.pathsep.join(path for path in sys.path if path)
        (self._work, work), (self._control, control) = socket.socketpair(), socket.socketpair()
        (stdout, out), (stderr, err) = os.pipe(), os.pipe()
        # The parent-death signal is tied to the thread that starts the worker, so this must be a long-lived thread.
        with (
            tempfile.TemporaryFile() as shared,
            work,
            control,
            open(out, "wb") as out_file,
            open(err, "wb") as err_file,
        ):
            shared.truncate(mmap.PAGESIZE)
            self.heartbeat = Heartbeat(shared.fileno())
            fds = [work.fileno(), control.fileno(), shared.fileno()]
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "prime_rl.envs.worker", *map(str, fds), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=out_file,
                    stderr=err_file,
                    env={**os.environ, "PYTHONPATH": paths, TOKEN_VARIABLE: add_token(self._token)},
                    pass_fds=fds,
                    start_new_session=True,
                )
            except OSError:
                os.close(stdout)
                os.close(stderr)
                raise
        self.outputs = [copy_redacted(stdout, os.dup(1)), copy_redacted(stderr, os.dup(2))]
        with suppress(OSError):  # it exited already, which `wait_loaded` reports
            agent, python_path = (config.command, config.num_workers), os.environ.get("PYTHONPATH")
            load = Load(*config.factory, config.timeout, score, sys.path, *agent, python_path)
            send_frame(self._control, encode(load))

    def wait_loaded(self) -> None:
        """Wait until the environment is loaded (blocking).

        Raises `ValueError` if it cannot be loaded, `WorkerDied` if the worker exited, `TimeoutError` after
        `LOAD_TIMEOUT_S`.
        """
        self._control.settimeout(LOAD_TIMEOUT_S)
        try:
            reply = msgspec.msgpack.decode(receive_frame(self._control), type=Loaded)
        except TimeoutError as error:
            raise TimeoutError(f"the environment did not load within {LOAD_TIMEOUT_S:g} s") from error
        except (EOFError, OSError) as error:
            raise WorkerDied(f"the worker ended while it loaded the environment ({self.describe_end()})") from error
        if reply.error is not None:
            raise ValueError(reply.error)
        self._control.settimeout(None)
        self.builds_prompts, self.scores_groups = reply.builds_prompts, reply.scores_groups
        self.ready, self.leave_s = True, reply.leave_s

    def read_rows(self, split: str) -> RowsReply:
        """Request the rows of a split (blocking); `WorkerDied` if the worker exited."""
        try:
            send_frame(self._control, encode(RowsRequest(split)))
            return msgspec.msgpack.decode(receive_frame(self._control), type=RowsReply)
        except (EOFError, OSError) as error:
            end = self.describe_end()
            raise WorkerDied(f"environment {self.name!r}: the worker exited while building its rows ({end})") from error

    def listen(
        self, loop: asyncio.AbstractEventLoop, on_finished: Callable[[Finished], None], on_close: Callable[[], None]
    ) -> None:
        """Receive finished groups in this event loop; a partly received message is continued from an earlier loop."""
        if self.channel is None:
            self.channel = FrameChannel(self._work, lambda frame: on_finished(decode_finished(frame)), on_close)
        self.channel.attach(loop)
        self._beat_seen = time.monotonic()

    def measure_stall(self) -> float:
        """Seconds since the last observed beat of the worker's event loop."""
        now, beats = time.monotonic(), self.heartbeat.beats
        if beats != self._beats:
            self._beats, self._beat_seen = beats, now
        return now - self._beat_seen

    @property
    def rss(self) -> int:
        """Resident memory in bytes; 0 if unavailable."""
        try:
            with open(f"/proc/{self.process.pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * resource.getpagesize()
        except (OSError, IndexError, ValueError):
            return 0

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended the process."""
        return (self.process.poll() or 0) < 0

    def describe_end(self) -> str:
        """How the process ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        code = self.process.returncode
        if code is None:
            return "closed its connection"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def disconnect(self) -> None:
        """Close the connections, which makes the worker cancel its groups and exit."""
        if self.channel is not None:
            self.channel.close()
        self.channel = None
        self._work.close()
        self._control.close()

    def kill(self) -> None:
        """End the process, if it has not exited, and all processes that it started."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        kill_run_processes(self._token)
