"""Telling inference engines which published weights to load, and believing them only when they say so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.to_thread

from rollouts.training.steps import parse_step


class InferenceEngine(Protocol):
    """Anything that can load a checkpoint directory; no base class needed."""

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        """Load the weights; answers at least `{"success": bool}`."""


class WeightSyncError(RuntimeError):
    """Not every engine holds the new weights. `states` says, in engine order, what became of each."""

    def __init__(self, checkpoint_path: str, states: list[tuple[str, str]]) -> None:
        self.states = states
        listed = "; ".join(f"{name}: {state}" for name, state in states)
        super().__init__(f"loading {checkpoint_path} failed: {listed}")


class PrimeEngine:
    """An inference server of `prime_rl`: POST /update_weights, verified by version and by tensor digests."""

    def __init__(self, base_url: str, timeout: float = 300.0, *, headers: dict[str, str] | None = None) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout
        self.headers = headers or {}

    def __str__(self) -> str:
        return self.base_url

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        """Load a `step_N` directory. Success means: the server answers version N and holds the published tensors."""
        path = Path(checkpoint_path).resolve()
        answer = await self._post("/update_weights", {"weight_dir": str(path)})
        problem = _wrong_version(path, answer) or await anyio.to_thread.run_sync(_wrong_tensor, path, answer)
        return {**answer, "success": problem is None, "message": problem or "loaded"}

    async def reload_weights(self) -> dict[str, Any]:
        """Back to the weights that the server started with (version 0)."""
        return {**await self._post("/reload_weights", {}), "success": True}

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        import httpx  # here, so that importing the room stays instant

        async with httpx.AsyncClient(timeout=self.timeout, headers=self.headers, trust_env=False) as client:
            reply = await client.post(self.base_url + path, json=body)
        if reply.status_code != 200:
            raise RuntimeError(f"{path} answered {reply.status_code}: {reply.text[:300]}")
        answer: dict[str, Any] = reply.json()
        return answer


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
        except Exception as error:
            answers[i] = {"success": False, "message": f"{type(error).__name__}: {error}"}

    async with anyio.create_task_group() as tasks:
        for i in range(len(engines)):
            tasks.start_soon(load, i)
    if not all(answer.get("success") is True for answer in answers):
        states = [
            (str(engine), "ok" if answer.get("success") is True else str(answer.get("message", answer)))
            for engine, answer in zip(engines, answers, strict=True)
        ]
        raise WeightSyncError(checkpoint_path, states)
    return answers


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
