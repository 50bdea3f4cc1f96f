"""Weight updates of a vLLM server: load, verify, roll back, and the weight versions of completions."""

from __future__ import annotations

import asyncio
import glob
import os
import shutil
import tempfile
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import orjson
import torch
from loguru import logger

from prime_rl.inference.adapters import POLICY, build_spec
from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.request_parsing import ApiError, Json
from prime_rl.inference.weight_receiver import NO_TRAINER
from prime_rl.transport.broadcast import Broadcast, BroadcastFailed, receive_weights
from prime_rl.transport.weights import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, WEIGHTS_FILE, is_adapter
from prime_rl.utils.monitor import Monitor, build_monitor
from rollouts.training.tensor_files import save_tensors

MAX_SPANS = 10_000
POLICY_ID = 1 << 20
"""vLLM's id of the policy adapter; adapters of /v1/load_lora_adapter are numbered from 1."""


class WeightUpdater:
    """The weights of a vLLM server; `client` is vLLM's `EngineClient`."""

    def __init__(self, config: InferenceConfig, model_dir: Path) -> None:
        self.version = 0
        self.awaits_weights = config.server.wait_for_weights
        self.broken: str | None = None
        """Why the weights are unknown; None if they are not."""
        self._was_paused = False
        """Before the update, or before those since the weights are unknown."""
        self.broadcast: Broadcast | None = None
        self._name, self._output_dir, self._port = config.name, config.output_dir, config.server.port
        self._model_dir = self._loaded_dir = model_dir
        self._adapter: Path | None = None
        """Directory of the policy adapter; None if the policy is the model itself."""
        self._policy: Any = None
        """The policy adapter as a vLLM `LoRARequest`."""
        self._warned_repair = False
        self._settled = asyncio.Event()
        self._settled.set()
        self._received: tempfile.TemporaryDirectory[str] | None = None
        self._updating = asyncio.Lock()
        self._spans: OrderedDict[str, list[tuple[int, list[list[int]]]]] = OrderedDict()
        self._monitor: Monitor | None = None
        if config.output_dir is not None:
            self._monitor = build_monitor(config.output_dir, config.name, must_write=False)

    async def reload(self, client: Any) -> Json:
        """Restore the initial weights, version 0."""
        return await self.load(client, self._model_dir, 0, None)

    async def load_broadcast(self, client: Any, step: int) -> Json:
        """Receive a version from the trainer into a temporary directory and load it (vLLM's loader reads files)."""
        if self.broadcast is None:
            raise ApiError(NO_TRAINER, 409, "weight_dir")
        try:
            directory, digests = await asyncio.to_thread(self._receive, self.broadcast, step)
        except (ValueError, OSError) as error:
            logger.warning(f"Weight update failed, version {self.version} stays in service: {error}")
            raise ApiError(str(error), 503 if isinstance(error, BroadcastFailed) else 400, "weight_dir") from error
        try:
            return await self.load(client, directory, step, digests)
        finally:  # keep the weights in service, for rollback
            in_use = (self._loaded_dir, self._adapter)
            for old in [path for path in directory.parent.iterdir() if path not in in_use]:
                shutil.rmtree(old)

    def _receive(self, broadcast: Broadcast, step: int) -> tuple[Path, dict[str, str]]:
        received = receive_weights(broadcast, step, self._name, torch.device("cpu"))
        if received.adapter_config is not None:
            build_spec(received.adapter_config, step, "the trainer")
        if self._received is None:
            self._received = self._create_received_dir()
        directory = Path(tempfile.mkdtemp(prefix=f"step_{step}-", dir=self._received.name))
        file = WEIGHTS_FILE
        if received.adapter_config is not None:
            file = ADAPTER_WEIGHTS_FILE
            (directory / ADAPTER_CONFIG_FILE).write_bytes(orjson.dumps(dict(received.adapter_config)))
        save_tensors(received.tensors, directory / file, metadata={"format": "pt"})
        return directory, {name: entry.digest for name, entry in received.manifest.tensors.items()}

    def _create_received_dir(self) -> tempfile.TemporaryDirectory[str]:
        """Create the directory of received weights, and remove those that this server has left when it was killed."""
        root = self._output_dir or Path(tempfile.gettempdir())
        prefix = f"received-{self._name}-{os.uname().nodename}-{self._port}-"  # servers may share `root`
        for left in root.glob(f"{glob.escape(prefix)}*"):
            shutil.rmtree(left, ignore_errors=True)
        return tempfile.TemporaryDirectory(prefix=prefix, dir=root)

    async def load(self, client: Any, directory: Path, version: int, digests: dict[str, str] | None) -> Json:
        """Pause, load, verify, reset the KV cache and resume, unless it was paused; running requests are recomputed.

        A directory with only a LoRA adapter also becomes the policy: the model in service with this adapter.
        """
        adapter = directory if is_adapter(directory) else None
        if adapter is not None and client.vllm_config.lora_config is None:
            raise ApiError(
                "this server was started without LoRA support: set inference.max_lora_rank, or "
                "trainer.model.lora.merge = true",
                param="weight_dir",
            )
        # A request keeps its adapter: if the policy switches between adapter and none, running requests end first.
        changes = (adapter is None) != (self._adapter is None)
        async with self._updating:
            if adapter is not None and self.broken is not None:  # the weights that it would change are unknown
                raise ApiError(self.broken, 503, "weight_dir")
            start = time.time()
            if self.broken is None:
                self._was_paused = bool(await client.is_paused())
            if changes:
                self._settled.clear()
            try:
                await client.pause_generation(mode="wait" if changes else "keep", clear_cache=False)
                try:
                    report = await self._load_frozen(client, directory, adapter)
                except Exception as error:
                    await self._restore(client, error, adapter)
                    if self.broken is not None:
                        raise ApiError(self.broken, 503, "weight_dir") from error
                    raise ApiError(f"{error}; version {self.version} stays in service", param="weight_dir") from error
                if hasattr(client, "update_weight_version"):
                    await client.update_weight_version(str(version))
                self.version, self._adapter, self.broken = version, adapter, None
                self._loaded_dir = self._loaded_dir if adapter is not None else directory
                self._policy = None if adapter is None else build_lora_request(adapter)
                self.awaits_weights = False
                if not self._was_paused:
                    await client.resume_generation()
            finally:
                self._settled.set()
            end = time.time()
        logger.info(f"Loaded weights version={version} (paused {end - start:.3f} s)")
        if self._monitor is not None:
            self._monitor.log_timeline("update_weights", start, end, version)
            self._monitor.log({"time/update_weights": end - start, "time/update_weights_pause": end - start}, version)
        self._warn(report)
        verified = {name: (digests or {}).get(name, digest) for name, digest in report["digests"].items()}
        notes = {name: report[name] for name in ("repaired", "unknown", "rounded") if report[name]}
        return {"status": "ok", "version": version, "digests": verified} | read_numerics(client) | notes

    def _warn(self, report: Json) -> None:
        if report["repaired"] and not self._warned_repair:
            self._warned_repair = True
            logger.warning(f"vLLM kept stale copies of {', '.join(report['repaired'])}: repacked and verified")
        if report["unknown"]:
            logger.warning(f"Cannot verify in vLLM: {', '.join(report['unknown'][:5])}")

    async def _load_frozen(self, client: Any, directory: Path, adapter: Path | None) -> Json:
        if adapter is not None:
            reports = await client.collective_rpc("load_published_adapter", args=(str(adapter), POLICY, POLICY_ID))
        elif self._adapter is not None and directory == self._loaded_dir:  # same model, without the adapter
            await client.collective_rpc("remove_published_adapter", args=(POLICY_ID,))
            reports = await client.collective_rpc("compare_published_weights", args=(str(directory),))
        else:
            reports = await client.collective_rpc("load_published_weights", args=(str(directory),))
        # Paused requests still hold KV blocks of the old weights: preempt them, so that they are recomputed.
        await client.reset_prefix_cache(reset_running_requests=True)
        report = dict(reports[0])
        for other in reports[1:]:
            report["digests"] = {k: v for k, v in report["digests"].items() if other["digests"].get(k) == v}
        return report

    async def _restore(self, client: Any, reason: Exception, failed: Path | None) -> None:
        """Roll back after a failed load; if that fails too, reject all further requests."""
        try:
            if failed is None:  # loading an adapter does not change the model
                await client.collective_rpc("load_published_weights", args=(str(self._loaded_dir),))
            if self._adapter is not None:
                await client.collective_rpc("load_published_adapter", args=(str(self._adapter), POLICY, POLICY_ID))
            elif failed is not None:
                await client.collective_rpc("remove_published_adapter", args=(POLICY_ID,))
            await client.reset_prefix_cache(reset_running_requests=True)
        except Exception as error:
            self.broken = f"failed to load the new weights and to restore the old ones ({reason}; {error}): restart it"
            logger.error(self.broken)
            return
        self.broken = None
        if not self._was_paused:
            await client.resume_generation()

    def wrap_generate(self, client: Any) -> None:
        """Wrap `client.generate`: add the policy adapter to requests without one, and record the version spans."""
        if getattr(client, "prime_rl_watched", False):
            return
        original = client.generate

        async def generate(*args: Any, **kwargs: Any) -> Any:
            await self._settled.wait()
            if self._policy is not None and kwargs.get("lora_request") is None:
                kwargs["lora_request"] = self._policy
            async for result in original(*args, **kwargs):
                if result.finished:
                    self._record_spans(result)
                yield result

        client.generate, client.prime_rl_watched = generate, True

    def _record_spans(self, result: Any) -> None:
        spans = []
        for output in result.outputs:
            reported = getattr(output, "weight_versions", None) or []
            versions = [[span.start, int(span.version) if span.version.isdigit() else 0] for span in reported]
            spans.append((output.index, versions or [[0, self.version]]))
        self._spans[result.request_id] = spans
        if len(self._spans) > MAX_SPANS:
            self._spans.popitem(last=False)

    def take_spans(self, answer_id: str, num_choices: int) -> dict[int, list[list[int]]]:
        """Pop the version spans of a response's choices; completions have a request `<id>-<i>` per prompt."""
        if answer_id in self._spans:
            return dict(self._spans.pop(answer_id))
        merged: dict[int, list[list[int]]] = {}
        prompt = 0
        while (spans := self._spans.pop(f"{answer_id}-{prompt}", None)) is not None:
            merged |= {prompt * len(spans) + index: span for index, span in spans}
            prompt += 1
        return merged


def read_numerics(client: Any) -> Json:
    """How log-probs are computed, on which their comparison with the trainer's depends."""
    return {"exact": False, "dtype": str(client.model_config.dtype).removeprefix("torch.")}


def build_lora_request(directory: Path) -> Any:
    """The policy adapter as a `LoRARequest`. Its path distinguishes the cached keys of different versions."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(POLICY, POLICY_ID, str(directory))
