"""Metrics of the training server, and its tenants, as files that `monitor` shows."""

from __future__ import annotations

import json
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prime_rl.runtime.run_dir import RunDir
from prime_rl.trainer.perf import peak_memory_gib
from prime_rl.training_api.futures import Future
from prime_rl.training_api.wire import CLASSES
from rollouts.training.files import replace_file
from rollouts.training.metrics import append_jsonl, load_jsonl

MAX_TENANTS = 256
"""Tenants without a session are forgotten, the least recent ones first, until no more than this are left."""


@dataclass
class Tenant:
    """What a tenant has used since the server started."""

    requests: int = 0
    failed: int = 0
    tokens_trained: int = 0
    tokens_sampled: int = 0
    last_request: float = field(default_factory=time.time)
    """Unix seconds."""


def count_tokens(kind: str, payload: bytes) -> int:
    """Number of tokens that a result trained or sampled."""
    if kind == "asample":
        return sum(len(sequence.tokens) for sequence in CLASSES["SampleResponse"].FromString(payload).sequences) // 4
    if kind != "forward_backward":
        return 0
    logprobs = [
        record.fields["logprobs"] for record in CLASSES["ForwardBackwardOutput"].FromString(payload).loss_fn_outputs
    ]
    return sum(len(x.data) // 4 // max(int(np.prod(x.trailing_shape)), 1) for x in logprobs)


class ServerMetrics:
    """Counts finished requests, and writes a row of metrics per interval in which there was work."""

    def __init__(self, output_dir: Path) -> None:
        self.files = RunDir(output_dir)
        self.tenants: OrderedDict[str, Tenant] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._step = max((int(row.get("step", 0)) for row in load_jsonl(self.files.metrics)), default=0)
        self._since, self._was_idle = time.monotonic(), True

    def observe(self, future: Future, payload: bytes | None) -> None:
        """Count a finished request and its result; None: it failed."""
        tenant = self.tenants.setdefault(future.owner, Tenant())
        self.tenants.move_to_end(future.owner)
        tenant.requests, tenant.last_request = tenant.requests + 1, time.time()
        self._counts[f"requests/{future.kind}"] += 1
        if payload is None:
            tenant.failed += 1
            self._counts["requests/failed"] += 1
            return
        num_tokens = count_tokens(future.kind, payload)
        group = "sampling" if future.kind == "asample" else "training"
        self._seconds[group].append(time.monotonic() - future.opened)
        if group == "sampling":
            tenant.tokens_sampled += num_tokens
        else:
            tenant.tokens_trained += num_tokens
        self._counts[group] += num_tokens

    def read(self, gauges: Mapping[str, float]) -> dict[str, float] | None:
        """Metrics since the last call with the current values `gauges`; None if the server stayed idle."""
        now = time.monotonic()
        elapsed, self._since = max(now - self._since, 1e-9), now
        is_idle = not self._counts and not gauges["queue/training"] and not gauges["queue/sampling"]
        was_idle, self._was_idle = self._was_idle, is_idle
        counts, seconds = self._counts, self._seconds
        self._counts, self._seconds = Counter(), defaultdict(list)
        if is_idle and was_idle:
            return None
        row = {**gauges, "requests/failed": 0.0, "perf/peak_memory": peak_memory_gib(torch.device("cpu"))}
        for group, name in (("training", "trained"), ("sampling", "sampled")):
            row[f"tokens_per_s/{name}"] = counts.pop(group, 0) / elapsed
            if seconds[group]:
                row |= {f"latency/{group}/p{q}": float(np.percentile(seconds[group], q)) for q in (50, 99)}
        return row | dict(counts)

    def write(self, row: Mapping[str, float], current: Mapping[str, Mapping[str, int]]) -> None:
        """Append a row, and replace the table of tenants; `current` counts the open objects of each."""
        self._step += 1
        head = {"step": self._step, "timestamp": time.time(), "process": "serve"}
        append_jsonl(self.files.metrics, [{**head, **row}])
        for owner in [owner for owner in self.tenants if owner not in current][:-MAX_TENANTS]:
            del self.tenants[owner]
        replace_file(self.files.tenants, json.dumps(self.describe(current)))

    def describe(self, current: Mapping[str, Mapping[str, int]]) -> Sequence[Mapping[str, Any]]:
        """One row per tenant, the most recent one first; a tenant is named by the start of the digest of its key."""
        none = {"sessions": 0, "models": 0, "waiting": 0}
        owners = sorted({*self.tenants, *current}, key=lambda owner: -self._find(owner).last_request)
        return [{"tenant": owner[:8], **none, **current.get(owner, {}), **vars(self._find(owner))} for owner in owners]

    def _find(self, owner: str) -> Tenant:
        return self.tenants.get(owner) or Tenant(last_request=0.0)
