"""What `rl` makes of a teacher: the taus, the server that answers for it, and where that server is found."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Mapping
from typing import Any, Protocol

from prime_rl.inference.config import InferenceConfig
from prime_rl.orchestrator.config import TeacherConfig
from prime_rl.trainer.config import DistillConfig, LossConfig
from prime_rl.utils.config import BASE_MODEL
from prime_rl.utils.pydantic_config import merge_tables

TEACHER = "orchestrator.teacher_model"
TAU = 0.5
"""What document 001 gives each of the three weights beside a teacher."""
MAX_PORTS = 100
TEMPLATE_ROOM = 64
"""Tokens that a chat template may write around a context."""


class Values(Protocol):
    """The raw tables of the config, see `prime_rl.config`."""

    def get(self, key: str) -> Any: ...
    def set(self, key: str, value: Any, source: str) -> None: ...
    def source(self, key: str) -> str: ...
    def show(self, key: str) -> str: ...
    def has(self, key: str) -> bool: ...


def add_teacher(values: Values) -> None:
    """Fill what the section `orchestrator.teacher_model` implies for trainer, servers and orchestrator."""
    if not isinstance(values.get(TEACHER), dict):
        for key in ("teacher_gpu_ids", "teacher_inference"):
            if values.has(key):
                raise ValueError(f"{values.show(key)} but there is no teacher: set [{TEACHER}], or leave it out")
        return
    _fill_taus(values)
    _ask_for_enough(values)
    _follow(values)
    _serve(values)


def describe_taus(loss: LossConfig) -> str:
    """The weights as they hold, and what unequal ones make of the teacher."""
    student = loss.teacher_tau if loss.student_tau is None else loss.student_tau
    text = f"adv_tau {loss.adv_tau:g}, teacher_tau {loss.teacher_tau:g}, student_tau {student:g}"
    if student == loss.teacher_tau:
        return f"{text}: the student is pulled to the teacher's own distribution (reverse KL)"
    if student == 0:
        return f"{text}: without a student term the target is the teacher's favourite alone, a collapse"
    return f"{text}: the target is p_teacher^({loss.teacher_tau / student:g}), not the teacher's own distribution"


def _fill_taus(values: Values) -> None:
    given = {name for name in ("adv_tau", "teacher_tau", "student_tau") if values.has(f"trainer.loss.{name}")}
    for name in ("adv_tau", "teacher_tau"):
        if name not in given:
            values.set(f"trainer.loss.{name}", TAU, TEACHER)
    if "student_tau" not in given:
        values.set("trainer.loss.student_tau", values.get("trainer.loss.teacher_tau"), "trainer.loss.teacher_tau")


def _ask_for_enough(values: Values) -> None:
    """The orchestrator asks the teacher for what the trainer's estimator compares."""
    key, distill = f"{TEACHER}.top_logprobs", values.get("trainer.loss.distill")
    given = distill if isinstance(distill, dict) else {}
    estimator, k = given.get("estimator", "token"), given.get("k", DistillConfig().k)
    wanted = {"auto": k, "topk+tail": k, "full": -1}.get(estimator, 0)
    if not values.has(key):
        values.set(key, wanted, "trainer.loss.distill")
    elif values.get(key) != wanted:
        raise ValueError(
            f'{values.show(key)} but trainer.loss.distill.estimator = "{estimator}" compares {wanted}\n'
            f"  leave {key} out: it follows the estimator"
        )


def _follow(values: Values) -> None:
    """A teacher that follows the student: the trainer keeps its average; anchors need the weights before training."""
    weights = _weights(values)
    if weights == "ema":
        values.set("trainer.ema_decay", _given(values, "ema_decay", TeacherConfig().ema_decay), TEACHER)
    envs = values.get("orchestrator.env") if values.has("orchestrator.env") else []
    rows = [env for env in envs if isinstance(env, dict)] if isinstance(envs, list) else []
    if weights != "frozen" and any(env.get("teacher") == "anchor" for env in rows) and not _keeps_base(values):
        raise ValueError(
            f'{TEACHER}.weights = "{weights}" leaves nobody who knows the weights before training, by which an anchor '
            'holds\n  set trainer.model.lora (our engine answers without the adapter too), or weights = "frozen"'
        )


def _weights(values: Values) -> str:
    return str(_given(values, "weights", TeacherConfig().weights))


def _given(values: Values, name: str, default: Any) -> Any:
    return values.get(f"{TEACHER}.{name}") if values.has(f"{TEACHER}.{name}") else default


def _serve(values: Values) -> None:
    """Name the server that answers for the teacher: one that runs, the student's, or one that rl starts."""
    own = [key for key in ("teacher_gpu_ids", "teacher_inference") if values.has(key)]
    if values.has(f"{TEACHER}.client.base_url"):
        if own:
            raise ValueError(
                f"{values.show(f'{TEACHER}.client.base_url')} names a teacher that runs already, "
                f"{own[0]} is for one that rl starts\n  remove one of them"
            )
        return
    is_live = _weights(values) == "live"
    if is_live and own:
        raise ValueError(f'{TEACHER}.weights = "live" is the student\'s own server: leave {own[0]} out')
    is_frozen = _weights(values) == "frozen"
    if is_live or (is_frozen and not own and not values.has(f"{TEACHER}.model.name") and _keeps_base(values)):
        values.set(f"{TEACHER}.client.base_url", values.get("orchestrator.client.base_url"), "orchestrator.client")
        if not values.has(f"{TEACHER}.model.name"):
            name = values.get("model.name") if is_live else BASE_MODEL
            values.set(f"{TEACHER}.model.name", name, "model.name" if is_live else "one copy of the weights")
        return
    _start(values)


def _keeps_base(values: Values) -> bool:
    """Whether the student's engine also answers with the weights before training: without the adapter."""
    lora = values.get("trainer.model.lora")
    is_adapter = isinstance(lora, dict) and not lora.get("merge", False)
    inference = values.get("inference")
    if not is_adapter or inference is None:
        return False
    backend = inference.get("backend", "auto") if isinstance(inference, dict) else "auto"
    return backend == "embedded" or (backend == "auto" and importlib.util.find_spec("vllm") is None)


def _start(values: Values) -> None:
    """The config of a server for the teacher: that of the student's, with what was said for it on top."""
    inference, own = values.get("inference"), values.get("teacher_inference")
    base = {key: value for key, value in (inference if isinstance(inference, dict) else {}).items()}
    base.pop("sglang", None)  # one server there holds one model, the student's
    if base.get("backend") == "sglang":
        del base["backend"]
    base.setdefault("model", {})
    base["model"] = {key: value for key, value in base["model"].items() if key not in ("name", "max_model_len")}
    base["server"] = {key: value for key, value in base.get("server", {}).items() if key != "port"}
    base["parallel"] = _share_gpus(values, base.pop("parallel", {}))
    merged = merge_tables(base, own if isinstance(own, dict) else {})
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
    """As many copies as the teacher's GPUs hold, each over as many of them as the student's."""
    is_cpu = values.get("inference.model.device") == "cpu"
    ids = values.get("teacher_gpu_ids") if values.has("teacher_gpu_ids") and not is_cpu else None
    num = len(ids) if isinstance(ids, list) else 1
    tp = math.gcd(int(parallel.get("tp", 1)), num)
    return {"tp": tp, "dp": num // tp}


def _needed_length(values: Values) -> int:
    """Room for the longest sample and the context: a text has no more tokens than bytes; else as long as a sample."""
    seq_len, context = int(values.get("seq_len")), values.get(f"{TEACHER}.context")
    return seq_len + (len(context.encode()) + TEMPLATE_ROOM if isinstance(context, str) else seq_len)


def _find_port(values: Values, host: str) -> int:
    """The first free port after that of inference."""
    from prime_rl.utils.process import check_port_free  # what starts processes is slow to import, `plan` starts none

    port = values.get("inference.server.port") if values.has("inference.server.port") else InferenceConfig().server.port
    taken = {values.get("transport.port")} if values.get("transport.type") == "zmq" else set()
    for number in range(int(port) + 1, min(int(port) + MAX_PORTS, 65536)):
        if number in taken:
            continue
        with contextlib.suppress(ValueError):
            check_port_free(host, number)
            return number
    raise ValueError(f"no port after inference.server.port = {port} is free: set teacher_inference.server.port")
