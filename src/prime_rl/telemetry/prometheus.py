"""Serves the latest metrics of a process at /metrics in the Prometheus text format, on the loopback address only."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOST = "127.0.0.1"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "prime_rl_"
Sample = tuple[str, str, str, float]
"""Name (without prefix), type (gauge or counter), help text, value."""


def render_samples(samples: Iterable[Sample], labels: Mapping[str, str] | None = None) -> str:
    """Render samples as text; `labels` are attached to every value."""
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in (labels or {}).items())
    shown = f"{{{pairs}}}" if pairs else ""
    return "".join(
        f"# HELP {PREFIX}{name} {_escaped(text)}\n# TYPE {PREFIX}{name} {kind}\n"
        f"{PREFIX}{name}{shown} {_number(value)}\n"
        for name, kind, text, value in samples
    )


def metric_name(name: str) -> str:
    """`loss/mean` -> `loss_mean`, `eval/reverse-text/avg@4` -> `eval_reverse_text_avg_at_4`."""
    return re.sub(r"[^a-zA-Z0-9_]+", "_", name.replace("@", "_at_"))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


@dataclass
class PrometheusTracker:
    """Serves the latest metrics from a thread; `port` 0 selects a free port."""

    process: str
    port: int
    _newest: dict[str, float] = field(default_factory=dict)
    _step: int = 0
    _time: float = field(default_factory=time.time)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        tracker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_metrics = self.path.split("?")[0] == "/metrics"
                body = (tracker.render() if is_metrics else "see /metrics\n").encode()
                self.send_response(200 if is_metrics else 404)
                self.send_header("content-type", CONTENT_TYPE)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer((HOST, self.port), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="prometheus")
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Store metrics; values of earlier steps are retained until logged again."""
        with self._lock:
            self._newest.update({name: float(value) for name, value in metrics.items()})
            self._step, self._time = step, time.time()

    def log_samples(self, rows: list[dict[str, object]], step: int) -> None:
        """Ignored: samples are not metrics."""

    def render(self) -> str:
        """The response to a scrape."""
        with self._lock:
            named = {metric_name(name): (name, value) for name, value in self._newest.items()}
            own: list[Sample] = [
                ("step", "gauge", "Step of the newest numbers.", self._step),
                ("last_log_timestamp_seconds", "gauge", "When they were logged.", self._time),
                ("process_cpu_seconds_total", "counter", "Processor time of this process.", time.process_time()),
            ]
        logged: list[Sample] = [(name, "gauge", text, value) for name, (text, value) in sorted(named.items())]
        reserved = {sample[0] for sample in own}
        return render_samples([*own, *(s for s in logged if s[0] not in reserved)], {"process": self.process})

    def finish(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
