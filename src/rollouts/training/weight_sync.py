"""Telling inference engines which published weights to load, and believing them only when they say so."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import anyio
import anyio.to_thread

from rollouts.training.steps import parse_step

CONTROL_TIMEOUT_S = 30.0  # of requests that load nothing
MOST_TOLD = 16
"""Engines of a larger fleet that are well are counted in messages, not named."""
NO_ROUTE = (404, 405)  # what a server answers that is older than the route
Kind = Literal["unreachable", "refused", "mismatch"]


class InferenceEngine(Protocol):
    """Anything that can load a checkpoint directory; no base class needed."""

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        """Load the weights; answers at least `{"success": bool}`."""


class EngineError(RuntimeError):
    """An engine did not take the weights: it was not reached in time, it refused, or it holds others than it should."""

    def __init__(self, kind: Kind, message: str) -> None:
        self.kind, self.message = kind, message
        super().__init__(f"{kind}: {message}")


class WeightSyncError(RuntimeError):
    """Not every engine holds the new weights. `states` says, in engine order, what became of each; `answers` are
    what those that hold them said (empty: the engine does not, or nobody asked)."""

    def __init__(
        self, checkpoint_path: str, states: list[tuple[str, str]], answers: Sequence[dict[str, Any]] = ()
    ) -> None:
        self.states = states
        self.answers = [answer if _succeeded(answer) else {} for answer in answers]
        told = states if len(states) <= MOST_TOLD else [pair for pair in states if pair[1] != "ok"]
        listed = "; ".join(f"{name}: {state}" for name, state in told)
        if len(told) < len(states):
            listed += f"; {len(states) - len(told)} others: ok"
        super().__init__(f"loading {checkpoint_path} failed: {listed}")


@dataclass(frozen=True)
class HttpServer:
    """Control routes of one engine. `timeout` seconds is what loading weights may take."""

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

    async def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any] | None:
        """The answer to any request, or None from a server that does not know the route. Raises `EngineError`."""
        status, text = await self._send(method, path, body, timeout_s or self._control_timeout)
        return None if status in NO_ROUTE else _accepted(path, (status, text))

    @property
    def _control_timeout(self) -> float:
        return min(CONTROL_TIMEOUT_S, self.timeout)

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> tuple[int, str]:
        import httpx  # here, so that importing the room stays instant

        # The limit is on the whole request: httpx's own would begin anew with every byte that trickles in.
        try:
            with anyio.fail_after(timeout_s):
                # Certificates are read where there are some to check: that alone takes 30 ms.
                verify = self.base_url.startswith("https://")
                async with httpx.AsyncClient(
                    timeout=None, headers=self.headers, trust_env=False, verify=verify
                ) as client:
                    reply = await client.request(method, self.base_url + path, json=body)
        except TimeoutError:
            raise EngineError("unreachable", f"{path} was not answered within {timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise EngineError("unreachable", f"{path}: {type(error).__name__} {error}".rstrip()) from error
        return reply.status_code, reply.text


class PrimeEngine(HttpServer):
    """An inference server of `prime_rl`: POST /update_weights, verified by version and by tensor digests."""

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        """Load a `step_N` directory. Success means: the server answers version N and holds the published tensors."""
        path = Path(checkpoint_path).resolve()
        answer = await self.load_version(path)
        problem = _wrong_version(path, answer) or await anyio.to_thread.run_sync(_wrong_tensor, path, answer)
        return {**answer, "success": problem is None, "message": problem or "loaded"}

    async def load_version(self, path: Path) -> dict[str, Any]:
        """The answer of a server that was told to load a directory. Raises `EngineError`."""
        return await self.load("/update_weights", {"weight_dir": str(path)})

    async def score_prompt(self, token_ids: list[int]) -> list[float]:
        """Log-prob of every token but the first behind those before it. Raises `EngineError`."""
        order = {"prompt": token_ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        answer = await self.load("/v1/completions", order)
        try:
            rows = answer["choices"][0]["prompt_logprobs"]
            return [row[str(token)]["logprob"] for row, token in zip(rows[1:], token_ids[1:], strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError("refused", f"/v1/completions told no prompt_logprobs ({error!r})") from error

    async def reload_weights(self) -> dict[str, Any]:
        """Back to the weights that the server started with (version 0)."""
        return {**await self.load("/reload_weights", {}), "success": True}


class SGLangEngine(HttpServer):
    """An SGLang server; see `update_sglang_weights_from_disk`."""

    async def update_weights_from_checkpoint(
        self, checkpoint_path: str, *, version: str | None = None
    ) -> dict[str, Any]:
        """Load the directory, as `version` or else N of `step_N`; `{"success": True, "version": ...}`. Raises
        `EngineError`."""
        return await _update_sglang(self, checkpoint_path, version)

    async def read_version(self) -> str | None:
        """The version that it says it holds; None: it is older than 0.5.2 and tells none. Raises `EngineError`."""
        route = await _sglang_version_route(self)
        return await _held_version(self, route) if route else None


class VLLMEngine(HttpServer):
    """A vLLM server in development mode; see `update_vllm_weights_from_disk`."""

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        """Load the directory; `{"success": True, "version": ...}`. Raises `EngineError`."""
        return await _update_vllm(self, checkpoint_path)


async def update_sglang_weights_from_disk(
    base_url: str, checkpoint_path: str, *, timeout: float = 300.0
) -> dict[str, Any]:
    """Let an SGLang server load a directory that it can read: pause, update, compare versions, continue.

    Running requests go back to the queue and are computed anew. The version is N of `step_N`; servers before 0.5.2
    have none, and the answer's `version` is then None. Raises `EngineError`, after which the server stays paused.
    """
    return await _update_sglang(HttpServer(base_url, timeout), checkpoint_path)


async def update_vllm_weights_from_disk(
    base_url: str, checkpoint_path: str, *, timeout: float = 300.0
) -> dict[str, Any]:
    """Let a vLLM server load a directory that it can read: pause, reload, forget cached prefixes, version, resume.

    Needs VLLM_SERVER_DEV_MODE=1 there. Servers with four-phase weight transfer also keep a version, which is set and
    compared; with older ones the answer's `version` is None. Raises `EngineError`, after which the server stays paused.
    """
    return await _update_vllm(HttpServer(base_url, timeout), checkpoint_path)


async def sync_weights_to_engines(engines: Sequence[InferenceEngine], checkpoint_path: str) -> list[dict[str, Any]]:
    """All engines load `checkpoint_path` at the same time; answers in engine order.

    Raises `WeightSyncError` listing every engine's state unless all succeed; `ValueError` without engines or path.
    """
    if not engines:
        raise ValueError("no engine to load the weights: pass at least one")
    if not checkpoint_path:
        raise ValueError("no checkpoint_path: pass the directory of the weights")
    answers: list[dict[str, Any]] = [{} for _ in engines]

    async def load(i: int) -> None:
        try:
            answers[i] = await engines[i].update_weights_from_checkpoint(checkpoint_path)
        except EngineError as error:
            answers[i] = {"success": False, "message": str(error)}
        except Exception as error:
            answers[i] = {"success": False, "message": f"{type(error).__name__}: {error}"}

    async with anyio.create_task_group() as tasks:
        for i in range(len(engines)):
            tasks.start_soon(load, i)
    if not all(_succeeded(answer) for answer in answers):
        states = [
            (_name(engine), "ok" if _succeeded(answer) else _complaint(answer))
            for engine, answer in zip(engines, answers, strict=True)
        ]
        raise WeightSyncError(checkpoint_path, states, answers)
    return answers


async def _update_sglang(server: HttpServer, checkpoint_path: str, version: str | None = None) -> dict[str, Any]:
    path, step = _location(checkpoint_path)
    version = version or step
    route = await _sglang_version_route(server)
    # Only retracted requests continue under the new weights with a cache that these filled.
    paused = await server.ask("POST", "/pause_generation", {"mode": "retract"}) is not None
    with _left(paused):
        # Servers without versions refuse what they do not know, so they are told the path alone.
        stamp = {"weight_version": version} if route and version else {}
        answer = await server.load("/update_weights_from_disk", {"model_path": path, **stamp})
        if not _succeeded(answer):
            raise EngineError("refused", f"/update_weights_from_disk: {_complaint(answer)}")
        held = await _held_version(server, route) if route else None
        _compare_versions(version if stamp else None, held)
    if paused:
        await server.post("/continue_generation", {})
    return {**answer, "version": held}


async def _sglang_version_route(server: HttpServer) -> str | None:
    """Where the server tells its `weight_version`: it moved with 0.5.15, and began with 0.5.2."""
    for route in ("/model_info", "/get_weight_version"):
        if "weight_version" in (await server.ask("GET", route) or {}):
            return route
    return None


async def _update_vllm(server: HttpServer, checkpoint_path: str) -> dict[str, Any]:
    path, version = _location(checkpoint_path)
    versioned = await server.ask("GET", "/weight_info") is not None
    # Frozen requests would hold on to blocks of the prefix cache, which then could not be emptied: let them finish.
    paused = await server.ask("POST", "/pause?mode=wait", timeout_s=server.timeout) is not None
    with _left(paused):
        # `weights_path` and no other name: with `params` or without a path vLLM loads what it started with.
        order: dict[str, Any] = {
            "method": "reload_weights",
            "args": [],
            "kwargs": {"weights_path": path},
            "timeout": None,
        }
        answer = await _reload_vllm(server, order)
        await server.post("/reset_prefix_cache")
        held = None
        if versioned and version:
            await server.post("/update_weight_version", {"new_version": version})
            held = await _held_version(server, "/weight_info")
            _compare_versions(version, held)
    if paused:
        await server.post("/resume")
    return {**answer, "success": True, "version": held}


async def _held_version(server: HttpServer, route: str) -> str | None:
    """What the server says it holds."""
    held = (await server.ask("GET", route) or {}).get("weight_version")
    return None if held is None else str(held)


async def _reload_vllm(server: HttpServer, order: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = await server.load("/collective_rpc", order)
    except EngineError as error:
        if "answered 404" in error.message:
            raise EngineError("refused", f"{error.message}; start vLLM with VLLM_SERVER_DEV_MODE=1") from error
        raise
    if answer.get("success") is False:
        raise EngineError("refused", f"/collective_rpc: {_complaint(answer)}")
    return answer


@contextlib.contextmanager
def _left(paused: bool) -> Iterator[None]:
    """Say in what state a failure leaves the server: better no samples than samples of unknown weights."""
    try:
        yield
    except EngineError as error:
        raise EngineError(error.kind, f"{error.message} (left {'paused' if paused else 'running'})") from error


def _accepted(path: str, reply: tuple[int, str]) -> dict[str, Any]:
    """The JSON object of a good reply; an empty body, or another JSON value, is an empty one."""
    status, text = reply
    if not 200 <= status < 300:
        raise EngineError("refused", f"{path} answered {status}: {text[:300]}")
    try:
        answer = json.loads(text) if text.strip() else {}
    except json.JSONDecodeError:
        answer = {}
    return answer if isinstance(answer, dict) else {}


def _location(checkpoint_path: str) -> tuple[str, str | None]:
    """What to tell the server: an absolute path where we see the directory, and N of `step_N` as text."""
    path = Path(checkpoint_path)
    step = parse_step(path.resolve().name)
    return str(path.resolve()) if path.exists() else checkpoint_path, None if step is None else str(step)


def _compare_versions(asked: str | None, held: str | None) -> None:
    if asked is not None and held != asked:
        raise EngineError("mismatch", f"asked for version {asked}, the server reports {held}")


def _succeeded(answer: dict[str, Any]) -> bool:
    return isinstance(answer, dict) and answer.get("success") is True


def _complaint(answer: dict[str, Any]) -> str:
    if not isinstance(answer, dict) or "success" not in answer:
        return f"answered {answer!r} without `success`"
    return str(answer.get("message", answer))


def _name(engine: InferenceEngine) -> str:
    """An address where there is one, else the name of the class."""
    return str(engine) if type(engine).__str__ is not object.__str__ else type(engine).__name__


def _wrong_version(path: Path, answer: dict[str, Any]) -> str | None:
    """An engine that reports another step than it was told would make every staleness number a lie."""
    asked = parse_step(path.name)
    if asked is not None and answer.get("version") != asked:
        return f"asked for version {asked}, the server reports {answer.get('version')}"
    return None


def _wrong_tensor(path: Path, answer: dict[str, Any]) -> str | None:
    """The first tensor whose digest in the engine differs from the manifest's; engines may hold derived ones too."""
    held: dict[str, str] = answer.get("digests") or {}
    manifest = path / "manifest.json"
    if not held or not manifest.is_file():
        return None
    tensors = json.loads(manifest.read_text()).get("tensors", {})
    published = {name: entry["digest"] for name, entry in tensors.items() if "digest" in entry}
    for name in sorted(published.keys() & held.keys()):
        if published[name] != held[name]:
            return f"tensor {name} arrived with digest {held[name]}, published was {published[name]}"
    return None
