"""Weight updates of inference engines over HTTP, verified by version and tensor digests."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.to_thread

from rollouts.training.concurrency import run_concurrently
from rollouts.training.json_files import read_json_file
from rollouts.training.proxies import build_http_client
from rollouts.training.steps import parse_step

CONTROL_TIMEOUT_S = 30.0  # of requests that load nothing
MAX_LISTED = 16
"""With more engines, an error message only lists those that failed."""
NO_ROUTE = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)  # of servers without the route


class FailureKind(StrEnum):
    """Why an engine did not do what was requested."""

    UNREACHABLE = "unreachable"  # no answer
    REFUSED = "refused"  # an error status, or an answer that reports a failure
    MISMATCH = "mismatch"  # the engine reports another version


class InferenceEngine(Protocol):
    """Anything that can load a checkpoint directory; no base class needed."""

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        """Load the weights; returns at least `{"success": bool}`."""


class EngineError(RuntimeError):
    """A request to an engine failed. `status`: the HTTP status of its answer, if that is an error status."""

    def __init__(self, kind: FailureKind, message: str, status: int | None = None) -> None:
        self.kind, self.message, self.status = kind, message, status
        super().__init__(f"{kind}: {message}")

    @property
    def is_transient(self) -> bool:
        """Whether the engine is down, or has no weights yet, so that the request can be repeated once it is ready."""
        return self.kind is FailureKind.UNREACHABLE or self.status == HTTPStatus.SERVICE_UNAVAILABLE

    @property
    def is_repeatable(self) -> bool:
        """Whether a repetition may succeed: also after 400, as of files that were unreadable for a moment, where the
        engine still has the earlier weights."""
        return self.is_transient or self.status == HTTPStatus.BAD_REQUEST


class WeightSyncError(RuntimeError):
    """A weight update failed on at least one engine. In engine order, `states` are (name, "ok" or error), `answers`
    the responses of the successful engines (empty for the others). `is_transient`, `is_repeatable`: every failure is
    (`EngineError`)."""

    def __init__(
        self,
        checkpoint_path: str,
        states: list[tuple[str, str]],
        answers: Sequence[dict[str, Any]] = (),
        *,
        is_transient: bool = False,
        is_repeatable: bool = False,
    ) -> None:
        self.states, self.is_transient, self.is_repeatable = states, is_transient, is_transient or is_repeatable
        self.answers = [answer if _succeeded(answer) else {} for answer in answers]
        listed_states = states if len(states) <= MAX_LISTED else [pair for pair in states if pair[1] != "ok"]
        listed = "; ".join(f"{name}: {state}" for name, state in listed_states)
        if len(listed_states) < len(states):
            listed += f"; {len(states) - len(listed_states)} others: ok"
        super().__init__(f"loading {checkpoint_path} failed: {listed}")


@dataclass(frozen=True)
class HttpServer:
    """Control routes of one engine. `timeout`: maximum seconds for loading weights."""

    base_url: str
    timeout: float = 300.0
    headers: dict[str, str] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url {self.base_url!r} of an engine must begin with http:// or https://")
        if not self.timeout > 0:
            raise ValueError(f"timeout {self.timeout} of an engine must be above 0 seconds")
        object.__setattr__(self, "base_url", self.base_url.rstrip("/").removesuffix("/v1"))

    def __str__(self) -> str:
        return self.base_url

    async def load(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a POST that loads weights. Raises `EngineError`."""
        return _accepted(path, await self._send("POST", path, body, self.timeout))

    async def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer to a POST. Raises `EngineError`."""
        return _accepted(path, await self._send("POST", path, body, self._control_timeout))

    async def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any] | None:
        """The response to any request, or None if the server does not have the route. Raises `EngineError`."""
        status, text = await self._send(method, path, body, timeout_s or self._control_timeout)
        return None if status in NO_ROUTE else _accepted(path, (status, text))

    async def read_reported(self, route: str) -> str | None:
        """The weight version that the server reports at `route`."""
        reported = (await self.request("GET", route) or {}).get("weight_version")
        return None if reported is None else str(reported)

    @property
    def _control_timeout(self) -> float:
        return min(CONTROL_TIMEOUT_S, self.timeout)

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> tuple[int, str]:
        import httpx  # imported here to keep the module import fast

        # Limits the whole request; httpx's own timeout restarts with every received byte.
        try:
            with anyio.fail_after(timeout_s):
                async with build_http_client(self.base_url, self.headers) as client:
                    reply = await client.request(method, self.base_url + path, json=body)
        except TimeoutError:
            raise EngineError(FailureKind.UNREACHABLE, f"{path} was not answered within {timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise EngineError(FailureKind.UNREACHABLE, f"{path}: {type(error).__name__} {error}".rstrip()) from error
        return reply.status_code, reply.text


class PrimeEngine(HttpServer):
    """An inference server of `prime_rl`: POST /update_weights, verified by version and by tensor digests."""

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        """Load a `step_N` directory. Success: the server reports version N and the published tensor digests."""
        path = Path(checkpoint_path).resolve()
        answer = await self.load_version(path)
        problem = _wrong_version(path, answer) or await anyio.to_thread.run_sync(_wrong_tensor, path, answer)
        return {**answer, "success": problem is None, "message": problem or "loaded"}

    async def load_version(self, path: Path) -> dict[str, Any]:
        """Load a directory and return the response. Raises `EngineError`."""
        return await self.load("/update_weights", {"weight_dir": str(path)})

    async def score_prompt(self, token_ids: list[int]) -> list[float]:
        """Log-prob of every token but the first, given the previous ones. Raises `EngineError`."""
        body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        answer = await self.load("/v1/completions", body)
        try:
            rows = answer["choices"][0]["prompt_logprobs"]
            return [row[str(token)]["logprob"] for row, token in zip(rows[1:], token_ids[1:], strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(
                FailureKind.REFUSED, f"/v1/completions returned no prompt_logprobs ({error!r})"
            ) from error

    async def reload_weights(self) -> dict[str, Any]:
        """Restore the weights that the server started with (version 0)."""
        return {**await self.load("/reload_weights", {}), "success": True}


class SGLangEngine(HttpServer):
    """An SGLang server; see `update_sglang_weights_from_disk`."""

    async def update_weights_from_checkpoint(
        self, checkpoint_path: str, *, version: str | None = None
    ) -> dict[str, Any]:
        """Load the directory, as `version` or else N of `step_N`; `{"success": True, "version": ...}`. Raises
        `EngineError`."""
        path, step = _resolve_checkpoint(checkpoint_path)
        version = version or step
        route = await self._find_version_route()
        # Retracted requests are recomputed, so that their KV cache comes from the new weights.
        paused = await self.request("POST", "/pause_generation", {"mode": "retract"}) is not None
        with _report_pause_state(paused):
            # Servers without versions reject unknown fields.
            stamp = {"weight_version": version} if route and version else {}
            answer = await self.load("/update_weights_from_disk", {"model_path": path, **stamp})
            if not _succeeded(answer):
                raise EngineError(FailureKind.REFUSED, f"/update_weights_from_disk: {_error_message(answer)}")
            reported = await self.read_reported(route) if route else None
            _compare_versions(version if stamp else None, reported)
        if paused:
            await self.post("/continue_generation", {})
        return {**answer, "version": reported}

    async def read_version(self) -> str | None:
        """The reported weight version; None for servers before 0.5.2. Raises `EngineError`."""
        route = await self._find_version_route()
        return await self.read_reported(route) if route else None

    async def _find_version_route(self) -> str | None:
        """The route with the server's `weight_version`; it exists since 0.5.2 and moved in 0.5.15."""
        for route in ("/model_info", "/get_weight_version"):
            if "weight_version" in (await self.request("GET", route) or {}):
                return route
        return None


class VLLMEngine(HttpServer):
    """A vLLM server in development mode; see `update_vllm_weights_from_disk`."""

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        """Load the directory; `{"success": True, "version": ...}`. Raises `EngineError`."""
        path, version = _resolve_checkpoint(checkpoint_path)
        versioned = await self.request("GET", "/weight_info") is not None
        # Wait for running requests: frozen ones keep prefix cache blocks, which then could not be reset.
        paused = await self.request("POST", "/pause?mode=wait", timeout_s=self.timeout) is not None
        with _report_pause_state(paused):
            # Must be `weights_path`: otherwise vLLM reloads its initial weights.
            body: dict[str, Any] = {
                "method": "reload_weights",
                "args": [],
                "kwargs": {"weights_path": path},
                "timeout": None,
            }
            answer = await self._reload(body)
            await self.post("/reset_prefix_cache")
            reported = None
            if versioned and version:
                await self.post("/update_weight_version", {"new_version": version})
                reported = await self.read_reported("/weight_info")
                _compare_versions(version, reported)
        if paused:
            await self.post("/resume")
        return {**answer, "success": True, "version": reported}

    async def _reload(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = await self.load("/collective_rpc", body)
        except EngineError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                message = f"{error.message}; start vLLM with VLLM_SERVER_DEV_MODE=1"
                raise EngineError(error.kind, message, error.status) from error
            raise
        if answer.get("success") is False:
            raise EngineError(FailureKind.REFUSED, f"/collective_rpc: {_error_message(answer)}")
        return answer


async def update_sglang_weights_from_disk(
    base_url: str, checkpoint_path: str, *, timeout: float = 300.0
) -> dict[str, Any]:
    """Update an SGLang server from a directory that it can read: pause, load, compare versions, continue.

    Running requests are retracted and recomputed. The version is N of `step_N`; None for servers before 0.5.2, which
    have no version. Raises `EngineError`, after which the server stays paused.
    """
    return await SGLangEngine(base_url, timeout).update_weights_from_checkpoint(checkpoint_path)


async def update_vllm_weights_from_disk(
    base_url: str, checkpoint_path: str, *, timeout: float = 300.0
) -> dict[str, Any]:
    """Update a vLLM server from a directory that it can read: pause, reload, reset prefix cache, set version, resume.

    The server needs VLLM_SERVER_DEV_MODE=1. Servers with four-phase weight transfer also have a version, which is set
    and compared; for older ones the returned `version` is None. Raises `EngineError`, after which the server stays
    paused.
    """
    return await VLLMEngine(base_url, timeout).update_weights_from_checkpoint(checkpoint_path)


async def sync_weights_to_engines(engines: Sequence[InferenceEngine], checkpoint_path: str) -> list[dict[str, Any]]:
    """Load `checkpoint_path` on all engines concurrently; returns the responses in engine order.

    Raises `WeightSyncError` listing every engine's state unless all succeed; `ValueError` without engines or path.
    """
    if not engines:
        raise ValueError("no engine to load the weights: pass at least one")
    if not checkpoint_path:
        raise ValueError("no checkpoint_path: pass the directory of the weights")
    answers: list[dict[str, Any]] = [{} for _ in engines]
    errors: dict[int, EngineError] = {}

    async def load(i: int) -> None:
        try:
            answers[i] = await engines[i].update_weights_from_checkpoint(checkpoint_path)
        except EngineError as error:
            answers[i], errors[i] = {"success": False, "message": str(error)}, error
        except Exception as error:
            answers[i] = {"success": False, "message": f"{type(error).__name__}: {error}"}

    await run_concurrently(load, range(len(engines)))
    failed = {i for i, answer in enumerate(answers) if not _succeeded(answer)}
    if failed:
        states = [
            (_name(engine), _error_message(answers[i]) if i in failed else "ok") for i, engine in enumerate(engines)
        ]
        raise WeightSyncError(
            checkpoint_path,
            states,
            answers,
            is_transient=all(i in errors and errors[i].is_transient for i in failed),
            is_repeatable=all(i in errors and errors[i].is_repeatable for i in failed),
        )
    return answers


@contextlib.contextmanager
def _report_pause_state(paused: bool) -> Iterator[None]:
    """Add the server's state to the error. After a failure it stays paused, to avoid samples of unknown weights."""
    try:
        yield
    except EngineError as error:
        left = "paused" if paused else "running"
        raise EngineError(error.kind, f"{error.message} (left {left})", error.status) from error


def _accepted(path: str, reply: tuple[int, str]) -> dict[str, Any]:
    """The JSON object of a successful reply; {} for an empty body or another JSON value."""
    status, text = reply
    if not 200 <= status < 300:
        raise EngineError(FailureKind.REFUSED, f"{path} answered {status}: {text[:300]}", status)
    try:
        answer = json.loads(text) if text.strip() else {}
    except (json.JSONDecodeError, RecursionError):
        answer = {}
    return answer if isinstance(answer, dict) else {}


def _resolve_checkpoint(checkpoint_path: str) -> tuple[str, str | None]:
    """Path to send to the server (absolute if the directory exists here), and N of `step_N` as text."""
    path = Path(checkpoint_path)
    step = parse_step(path.resolve().name)
    return str(path.resolve()) if path.exists() else checkpoint_path, None if step is None else str(step)


def _compare_versions(expected: str | None, reported: str | None) -> None:
    if expected is not None and reported != expected:
        raise EngineError(FailureKind.MISMATCH, f"expected version {expected}, the server reports {reported}")


def _succeeded(answer: dict[str, Any]) -> bool:
    return isinstance(answer, dict) and answer.get("success") is True


def _error_message(answer: dict[str, Any]) -> str:
    if not isinstance(answer, dict) or "success" not in answer:
        return f"answered {answer!r} without `success`"
    return str(answer.get("message", answer))


def _name(engine: InferenceEngine) -> str:
    """The engine's address, or else its class name."""
    return str(engine) if type(engine).__str__ is not object.__str__ else type(engine).__name__


def _wrong_version(path: Path, answer: dict[str, Any]) -> str | None:
    """An error message if the engine reports another version, which would invalidate all staleness metrics."""
    expected = parse_step(path.name)
    if expected is not None and answer.get("version") != expected:
        return f"expected version {expected}, the server reports {answer.get('version')}"
    return None


def _wrong_tensor(path: Path, answer: dict[str, Any]) -> str | None:
    """An error message for the first tensor whose digest differs from the manifest; additional tensors are ignored."""
    reported: dict[str, str] = answer.get("digests") or {}
    manifest = path / "manifest.json"
    if not reported or not manifest.is_file():
        return None
    tensors = read_json_file(manifest).get("tensors", {})
    published = {name: entry["digest"] for name, entry in tensors.items() if "digest" in entry}
    for name in sorted(published.keys() & reported.keys()):
        if published[name] != reported[name]:
            return f"tensor {name} arrived with digest {reported[name]}, published was {published[name]}"
    return None
