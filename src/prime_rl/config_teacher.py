"""Derived configuration of a teacher: loss weights, its server and the address of that server."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Mapping
from typing import Any, Protocol

from prime_rl.configuration.sections import BASE_MODEL
from prime_rl.inference.config import InferenceConfig
from prime_rl.orchestrator.config import TeacherConfig
from prime_rl.trainer.config import DistillConfig, LossConfig
from prime_rl.utils.pydantic_config import merge_tables

TEACHER = "orchestrator.teacher_model"
TAU = 0.5
"""Default of each of the three loss weights with a teacher (document 001)."""
MAX_PORTS = 100
TEMPLATE_TOKENS = 64
"""Allowance for the tokens that a chat template adds around a context."""


class Values(Protocol):
    """Raw config tables, see `prime_rl.config`."""

    def get(self, key: str) -> Any: ...
    def set(self, key: str, value: Any, source: str) -> None: ...
    def source(self, key: str) -> str: ...
    def show(self, key: str) -> str: ...
    def has(self, key: str) -> bool: ...


def add_teacher(values: Values) -> None:
    """Set the keys of trainer, servers and orchestrator that `orchestrator.teacher_model` implies."""
    if not isinstance(values.get(TEACHER), dict):
        for key in ("teacher_gpu_ids", "teacher_inference"):
            if values.has(key):
                raise ValueError(f"{values.show(key)} but there is no teacher: set [{TEACHER}], or leave it out")
        return
    _fill_taus(values)
    _set_top_logprobs(values)
    _require_teacher_weights(values)
    _choose_server(values)


def describe_taus(loss: LossConfig) -> str:
    """The resolved loss weights and the target distribution that they imply."""
    student = loss.teacher_tau if loss.student_tau is None else loss.student_tau
    text = f"adv_tau {loss.adv_tau:g}, teacher_tau {loss.teacher_tau:g}, student_tau {student:g}"
    if student == loss.teacher_tau:
        return f"{text}: the target is the teacher's distribution (reverse KL)"
    if student == 0:
        return f"{text}: without a student term the target collapses to the teacher's mode"
    return f"{text}: the target is p_teacher^({loss.teacher_tau / student:g}), not the teacher's own distribution"


def _fill_taus(values: Values) -> None:
    given = {name for name in ("adv_tau", "teacher_tau", "student_tau") if values.has(f"trainer.loss.{name}")}
    for name in ("adv_tau", "teacher_tau"):
        if name not in given:
            values.set(f"trainer.loss.{name}", TAU, TEACHER)
    if "student_tau" not in given:
        values.set("trainer.loss.student_tau", values.get("trainer.loss.teacher_tau"), "trainer.loss.teacher_tau")


def _set_top_logprobs(values: Values) -> None:
    """Request as many teacher log-probs per position as the trainer's estimator compares."""
    key, distill = f"{TEACHER}.top_logprobs", values.get("trainer.loss.distill")
    given = distill if isinstance(distill, dict) else {}
    estimator, k = given.get("estimator", "token"), given.get("k", DistillConfig().k)
    num_logprobs = {"auto": k, "topk+tail": k, "full": -1}.get(estimator, 0)
    if not values.has(key):
        values.set(key, num_logprobs, "trainer.loss.distill")
    elif values.get(key) != num_logprobs:
        raise ValueError(
            f'{values.show(key)} but trainer.loss.distill.estimator = "{estimator}" compares {num_logprobs}\n'
            f"  leave {key} out: it follows the estimator"
        )


def _require_teacher_weights(values: Values) -> None:
    """EMA teachers need an average in the trainer; reference environments need the weights before training."""
    weights = _weights(values)
    if weights == "ema":
        values.set("trainer.ema_decay", _given(values, "ema_decay", TeacherConfig().ema_decay), TEACHER)
    envs = values.get("orchestrator.env") if values.has("orchestrator.env") else []
    rows = [env for env in envs if isinstance(env, dict)] if isinstance(envs, list) else []
    if weights != "frozen" and any(env.get("teacher") == "reference" for env in rows) and not _serves_base(values):
        raise ValueError(
            f'{TEACHER}.weights = "{weights}" leaves no server with the weights before training, which a '
            "reference environment needs\n"
            '  set trainer.model.lora (our engine also serves the base model), or weights = "frozen"'
        )


def _weights(values: Values) -> str:
    return str(_given(values, "weights", TeacherConfig().weights))


def _given(values: Values, name: str, default: Any) -> Any:
    return values.get(f"{TEACHER}.{name}") if values.has(f"{TEACHER}.{name}") else default


def _choose_server(values: Values) -> None:
    """Choose the teacher's server: a running one, the student's, or one that rl starts."""
    dedicated = [key for key in ("teacher_gpu_ids", "teacher_inference") if values.has(key)]
    if values.has(f"{TEACHER}.client.base_url"):
        if dedicated:
            raise ValueError(
                f"{values.show(f'{TEACHER}.client.base_url')} names a teacher that runs already, "
                f"{dedicated[0]} is for one that rl starts\n  remove one of them"
            )
        return
    is_live = _weights(values) == "live"
    if is_live and dedicated:
        raise ValueError(f'{TEACHER}.weights = "live" is the student\'s own server: leave {dedicated[0]} out')
    is_frozen = _weights(values) == "frozen"
    if is_live or (is_frozen and not dedicated and not values.has(f"{TEACHER}.model.name") and _serves_base(values)):
        values.set(f"{TEACHER}.client.base_url", values.get("orchestrator.client.base_url"), "orchestrator.client")
        if not values.has(f"{TEACHER}.model.name"):
            name = values.get("model.name") if is_live else BASE_MODEL
            values.set(f"{TEACHER}.model.name", name, "model.name" if is_live else "one copy of the weights")
        return
    _configure_server(values)


def _serves_base(values: Values) -> bool:
    """Whether the student's engine also serves the base model (without the adapter)."""
    lora = values.get("trainer.model.lora")
    is_adapter = isinstance(lora, dict) and not lora.get("merge", False)
    inference = values.get("inference")
    if not is_adapter or inference is None:
        return False
    backend = inference.get("backend", "auto") if isinstance(inference, dict) else "auto"
    return backend == "embedded" or (backend == "auto" and importlib.util.find_spec("vllm") is None)


def _configure_server(values: Values) -> None:
    """Build the config of the teacher's server: that of the student's, overridden by `teacher_inference`."""
    inference, overrides = values.get("inference"), values.get("teacher_inference")
    base = {key: value for key, value in (inference if isinstance(inference, dict) else {}).items()}
    base.pop("sglang", None)  # an SGLang server serves one model, the student's
    if base.get("backend") == "sglang":
        del base["backend"]
    base.setdefault("model", {})
    base["model"] = {key: value for key, value in base["model"].items() if key not in ("name", "max_model_len")}
    base["server"] = {key: value for key, value in base.get("server", {}).items() if key != "port"}
    base["parallel"] = _share_gpus(values, base.pop("parallel", {}))
    merged = merge_tables(base, overrides if isinstance(overrides, dict) else {})
    name = values.get(f"{TEACHER}.model.name") if values.has(f"{TEACHER}.model.name") else None
    if name is None:
        name = merged["model"].get("name", values.get("model.name"))
        values.set(f"{TEACHER}.model.name", name, "model.name")
    if merged["model"].setdefault("name", name) != name:
        raise ValueError(
            f"{values.show(f'{TEACHER}.model.name')} and {values.show('teacher_inference.model.name')} disagree\n"
            "  remove one of them"
        )
    if merged["model"].get("max_model_len") is None:
        merged["model"]["max_model_len"] = _needed_length(values)
    server = merged["server"]
    if "port" not in server:
        server["port"] = _find_port(values, str(server.get("host", InferenceConfig().server.host)))
    merged["name"] = "teacher_inference"
    values.set("teacher_inference", merged, TEACHER)
    host = str(server.get("host", InferenceConfig().server.host))
    address = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    values.set(f"{TEACHER}.client.base_url", [f"http://{address}:{server['port']}/v1"], "teacher_inference.server")


def _share_gpus(values: Values, parallel: Mapping[str, Any]) -> dict[str, int]:
    """Tensor parallelism as for the student; data parallelism over the rest of the teacher's GPUs."""
    is_cpu = values.get("inference.model.device") == "cpu"
    ids = values.get("teacher_gpu_ids") if values.has("teacher_gpu_ids") and not is_cpu else None
    num = len(ids) if isinstance(ids, list) else 1
    tp = math.gcd(int(parallel.get("tp", 1)), num)
    return {"tp": tp, "dp": num // tp}


def _needed_length(values: Values) -> int:
    """Tokens for the longest sample plus the context (at most its bytes; unknown contexts: seq_len)."""
    seq_len, context = int(values.get("seq_len")), values.get(f"{TEACHER}.context")
    return seq_len + (len(context.encode()) + TEMPLATE_TOKENS if isinstance(context, str) else seq_len)


def _find_port(values: Values, host: str) -> int:
    """The first free port after that of inference."""
    from prime_rl.runtime.process import check_port_free  # slow import that `plan` does not need

    port = values.get("inference.server.port") if values.has("inference.server.port") else InferenceConfig().server.port
    taken = {values.get("transport.port")} if values.get("transport.type") == "zmq" else set()
    for number in range(int(port) + 1, min(int(port) + MAX_PORTS, 65536)):
        if number in taken:
            continue
        with contextlib.suppress(ValueError):
            check_port_free(host, number)
            return number
    raise ValueError(f"no port after inference.server.port = {port} is free: set teacher_inference.server.port")
