"""Derived configuration of a teacher: loss weights, its server and the address of that server."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError

from prime_rl.client.contexts import read_context_file
from prime_rl.config_sharing import build_url, find_envs, find_port, find_server, has_adapter, share_api_key
from prime_rl.configuration.sections import BASE_MODEL, ClientConfig
from prime_rl.configuration.tables import ConfigTables
from prime_rl.inference.config import InferenceConfig, prefers_vllm
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.distillation.config import CONTEXT_SOURCES, TeacherConfig
from prime_rl.trainer.rl.config import DistillConfig, LossConfig, fill_distill
from prime_rl.utils.pydantic_config import merge_tables

TEACHER = "orchestrator.teacher_model"
TAU = 0.5
"""Default of each of the three loss weights with a teacher (document 001)."""
TEMPLATE_TOKENS = 64
"""Allowance for the tokens that a chat template adds around a context."""

SELF_TEACHERS: dict[str, dict[str, Any]] = {
    "sdpo": {"context_from": "sibling", "weights": "frozen"},  # the paper: an average with a decay of 0.95
    "opsd": {"context_from": "answer", "weights": "frozen"},
    "sdpg": {"context_from": "answer", "weights": "live"},
}
"""The orchestrator's half of `trainer.loss.type`: context and weights of the teacher."""

DIVERGENCES = {
    "reverse": "reverse KL",
    "forward": "forward KL",
    "jsd": "Jensen-Shannon divergence",
    "adaptive": "reverse KL, forward KL for tokens that the student rarely samples",
}
"""`loss.distill.direction` in words."""


def add_teacher(tables: ConfigTables) -> None:
    """Set the keys of trainer, servers and orchestrator that `orchestrator.teacher_model` implies."""
    loss_type = str(tables.get("trainer.loss.type"))
    if loss_type in SELF_TEACHERS and not tables.is_set(TEACHER):
        tables.set(TEACHER, {}, f"trainer.loss.type {loss_type}")
    if not isinstance(tables.get(TEACHER), dict):
        for key in ("teacher_gpu_ids", "teacher_inference"):
            if tables.has(key):
                raise ValueError(f"{tables.show(key)} but there is no teacher: set [{TEACHER}], or leave it out")
        return
    _fill_taus(tables)
    _fill_self_teacher(tables)
    _set_top_logprobs(tables)
    _require_teacher_weights(tables)
    _choose_server(tables)
    _set_window(tables)


def describe_taus(loss: LossConfig) -> str:
    """The resolved loss weights and the target distribution that they imply, of a run with a teacher."""
    student = loss.teacher_tau if loss.student_tau is None else loss.student_tau
    text = f"adv_tau {loss.adv_tau:g}, teacher_tau {loss.teacher_tau:g}, student_tau {student:g}"
    if not loss.teacher_tau:
        return f"{text}: the teacher is only the reference of a KL"
    if student == loss.teacher_tau:
        divergence = DIVERGENCES["adaptive" if loss.distill.estimator == "auto" else loss.distill.direction]
        return f"{text}: the target is the teacher's distribution ({divergence})"
    if student == 0:
        return f"{text}: without a student term the target collapses to the teacher's mode"
    return f"{text}: the target is p_teacher^({loss.teacher_tau / student:g}), not the teacher's own distribution"


def check_contexts(
    orchestrator: OrchestratorConfig, inference: InferenceConfig | None, teacher_inference: InferenceConfig | None
) -> None:
    """`ValueError` for a constant context that does not fit the window of a server that rl starts.

    Servers: the teacher's; with `eval_baseline` also the student's, which is evaluated with the context.
    """
    from prime_rl.runtime.tokenizer import check_window

    teacher = orchestrator.teacher_model
    if teacher is None:
        return
    servers = [("teacher_inference.model.max_model_len", "", teacher_inference, teacher.max_model_len)]
    if teacher_inference is None and teacher.client.base_url == orchestrator.client.base_url:
        servers = [("seq_len", "", inference, teacher.max_model_len)]
    if teacher.eval_baseline and inference is not None:
        use = ", with which eval_baseline evaluates the student,"
        servers.append(("seq_len", use, inference, inference.model.max_model_len))
    sections = [("teacher_model", teacher), *((f"env.{i}", env) for i, env in enumerate(orchestrator.env))]
    for name, section in sections:
        text = section.context or ""
        if section.context_file is not None:
            text = read_context_file(section.context_file)
        for key, use, server, window in servers:
            if server is not None:
                what = f"orchestrator.{name}.{section.source}{use}"
                check_window(text, server.model.name, window, what, key)


def check_tokenizer(student: str, teacher_inference: InferenceConfig | None) -> None:
    """`ValueError` if the teacher that rl starts has another vocabulary than the student, as far as both are local."""
    from prime_rl.runtime.tokenizer import find_local_model, has_same_vocabulary

    if teacher_inference is None or (name := teacher_inference.model.name) == student:
        return
    own, other = find_local_model(student), find_local_model(name)
    if own is not None and other is not None and not has_same_vocabulary(own, other):
        raise ValueError(
            f"{TEACHER}.model.name = {name!r} has another tokenizer than model.name = {student!r}, so it cannot score "
            "the student's tokens: choose a teacher with the same vocabulary"
        )


def _fill_self_teacher(tables: ConfigTables) -> None:
    """Set context and weights of the teacher from a preset of self-distillation, unless they are given."""
    loss_type = str(tables.get("trainer.loss.type"))
    given = _set_keys(tables.section(TEACHER))
    has_source = given & {"context_from", "context", "context_file", "context_fn"} or not _uses_default_context(tables)
    for name, value in SELF_TEACHERS.get(loss_type, {}).items():
        if name not in given and not (name == "context_from" and has_source):
            tables.set(f"{TEACHER}.{name}", value, f"trainer.loss.type {loss_type}")


def _uses_default_context(tables: ConfigTables) -> bool:
    """Whether an environment has a teacher with a context, but no context of its own."""
    envs = [*find_envs(tables).values()] or [{}]
    taught = [_set_keys(env) for env in envs if env.get("teacher") in (None, "context")]
    return any(not keys & {"context_from", *CONTEXT_SOURCES} for keys in taught)


def _given_keys(tables: ConfigTables) -> set[str]:
    """Keys that the teacher or an environment sets."""
    return {name for section in _find_sections(tables) for name in _set_keys(section)}


def _find_sections(tables: ConfigTables) -> list[dict[str, Any]]:
    """The tables that may set a context."""
    return [tables.section(TEACHER), *find_envs(tables).values()]


def _set_keys(section: dict[str, Any]) -> set[str]:
    return {name for name, value in section.items() if value is not None}


def _fill_taus(tables: ConfigTables) -> None:
    """Default loss weights: those of a distillation, or 1, 0, 0 where the teacher is only the reference of a KL."""
    if tables.get("trainer.loss.type") in SELF_TEACHERS:
        return
    taus = [f"trainer.loss.{name}" for name in ("adv_tau", "teacher_tau", "student_tau")]
    source = _find_kl(tables)
    if source not in (None, "orchestrator.advantage.kl_coef"):
        has_taus = source == "trainer.loss.kl_coef" and any(map(tables.has, taus))
        is_distillation = _given_keys(tables) & {"context_from", *CONTEXT_SOURCES} or has_taus
        source = None if is_distillation else source
    for key, value in zip(taus[:2], (TAU, TAU) if source is None else (1.0, 0.0), strict=True):
        if not tables.has(key):
            tables.set(key, value, source or TEACHER)
    if not tables.has("trainer.loss.student_tau"):
        tables.set("trainer.loss.student_tau", tables.get("trainer.loss.teacher_tau"), "trainer.loss.teacher_tau")


def _find_kl(tables: ConfigTables) -> str | None:
    """The key of a KL to the reference: in all rewards, in those of an environment, or in the loss."""
    if tables.get(key := "orchestrator.advantage.kl_coef"):
        return key
    for i, env in find_envs(tables).items():
        advantage = env.get("advantage")
        if isinstance(advantage, dict) and advantage.get("kl_coef"):
            return f"orchestrator.env.{i}.advantage.kl_coef"
    return key if tables.get(key := "trainer.loss.kl_coef") else None


def _set_top_logprobs(tables: ConfigTables) -> None:
    """Request as many teacher log-probs per position as the trainer's estimator compares."""
    options = fill_distill(tables.get("trainer.loss.type"), tables.section("trainer.loss.distill"))
    key, distill = f"{TEACHER}.top_logprobs", DistillConfig.model_construct(**options)
    if not tables.has(key):
        tables.set(key, distill.top_logprobs, "trainer.loss.distill")
    elif tables.get(key) != distill.top_logprobs:
        raise ValueError(
            f'{tables.show(key)} but trainer.loss.distill.estimator = "{distill.estimator}" compares '
            f"{distill.top_logprobs}\n  leave {key} out: it follows the estimator"
        )


def _require_teacher_weights(tables: ConfigTables) -> None:
    """EMA teachers need an average in the trainer; reference environments need the weights before training."""
    weights = _weights(tables)
    if weights == "ema":
        tables.set("trainer.ema_decay", tables.get(f"{TEACHER}.ema_decay", TeacherConfig().ema_decay), TEACHER)
    has_reference = any(env.get("teacher") == "reference" for env in find_envs(tables).values())
    if weights != "frozen" and has_reference and not _serves_base(tables):
        raise ValueError(
            f'{TEACHER}.weights = "{weights}" leaves no server with the weights before training, which a '
            "reference environment needs\n"
            '  set trainer.model.lora (our engine also serves the base model), or weights = "frozen"'
        )


def _set_window(tables: ConfigTables) -> None:
    """Set the window of the teacher's server. Our engine, where it serves the student too, scores up to the model's."""
    has_own = tables.has("teacher_inference")
    if tables.has(f"{TEACHER}.max_model_len") or (not has_own and _is_shared(tables) and _is_embedded(tables)):
        return
    server = tables.section("teacher_inference" if has_own else "inference")
    if (window := server.get("model", {}).get("max_model_len")) is not None:
        tables.set(f"{TEACHER}.max_model_len", window, "the teacher's server")


def _is_shared(tables: ConfigTables) -> bool:
    """Whether the teacher's address is that of the student's server."""
    return bool(tables.get(f"{TEACHER}.client.base_url") == _student_urls(tables))


def _student_urls(tables: ConfigTables) -> Any:
    """The addresses of the student's servers; those of a running one may be the default."""
    return tables.get("orchestrator.client.base_url", ClientConfig().base_url)


def _weights(tables: ConfigTables) -> str:
    return str(tables.get(f"{TEACHER}.weights", TeacherConfig().weights))


def _choose_server(tables: ConfigTables) -> None:
    """Choose the teacher's server: a running one, the student's, or one that rl starts."""
    url, name, weights = f"{TEACHER}.client.base_url", f"{TEACHER}.model.name", _weights(tables)
    dedicated = [*filter(tables.has, ("teacher_gpu_ids", "teacher_inference"))]
    if tables.has(url) and not _is_own_server(tables):
        if dedicated:
            raise ValueError(
                f"{tables.show(url)} names a teacher that runs already, {dedicated[0]} is for one that rl starts\n"
                "  remove one of them"
            )
        if weights == "frozen" and not tables.has(name) and _is_shared(tables) and _serves_base(tables):
            tables.set(name, BASE_MODEL, "one copy of the weights")
    elif weights == "live":
        if dedicated:
            raise ValueError(f'{TEACHER}.weights = "live" is the student\'s own server: leave {dedicated[0]} out')
        tables.set(url, _student_urls(tables), "orchestrator.client")
        share_api_key(tables, TEACHER, "orchestrator.client.api_key_var")
        if not tables.has(name):
            tables.set(name, tables.get("model.name"), "model.name")
    elif weights == "frozen" and not dedicated and not tables.has(name) and _serves_base(tables):
        tables.set(url, _student_urls(tables), "orchestrator.client")
        share_api_key(tables, TEACHER, "orchestrator.client.api_key_var")
        tables.set(name, BASE_MODEL, "one copy of the weights")
    else:
        _configure_server(tables)


def _is_own_server(tables: ConfigTables) -> bool:
    """Whether the teacher's address is that of `teacher_inference`, as in a resolved configuration."""
    server = tables.section("teacher_inference").get("server", {})
    own = (
        build_url(str(server.get("host", InferenceConfig().server.host)), server["port"]) if "port" in server else None
    )
    return bool(tables.get(f"{TEACHER}.client.base_url") == [own])


def _serves_base(tables: ConfigTables) -> bool:
    """Whether the student's engine also serves the base model (without the adapter)."""
    return has_adapter(tables) and not tables.is_off("inference") and _is_embedded(tables)


def _is_embedded(tables: ConfigTables) -> bool:
    """Whether the student's engine is ours."""
    backend = tables.get("inference.backend", "auto")
    if backend != "auto":
        return bool(backend == "embedded")
    try:
        return not prefers_vllm(InferenceConfig.model_validate(tables.section("inference")))
    except ValidationError:  # which names its key later, where the whole configuration is validated
        return True


def _configure_server(tables: ConfigTables) -> None:
    """Build the config of the teacher's server: that of the student's, overridden by `teacher_inference`."""
    from prime_rl.runtime.tokenizer import find_window  # lazy: only runs with such a server need it

    base = dict(tables.section("inference"))
    base.pop("sglang", None)  # an SGLang server serves one model, the student's
    if base.get("backend") == "sglang":
        del base["backend"]
    model, server = dict(tables.section("inference.model")), dict(tables.section("inference.server"))
    for own in ("name", "max_model_len"):
        model.pop(own, None)
    server.pop("port", None)
    parallel = _share_gpus(tables)
    merged = merge_tables(
        {**base, "model": model, "server": server, "parallel": parallel}, tables.section("teacher_inference")
    )
    name = tables.get(f"{TEACHER}.model.name")
    if name is None:
        name = merged["model"].get("name", tables.get("model.name"))
        tables.set(f"{TEACHER}.model.name", name, "model.name")
    if merged["model"].setdefault("name", name) != name:
        raise ValueError(
            f"{tables.show(f'{TEACHER}.model.name')} and {tables.show('teacher_inference.model.name')} disagree\n"
            "  remove one of them"
        )
    if merged["model"].get("max_model_len") is None:
        window = find_window(str(merged["model"]["name"]))
        merged["model"]["max_model_len"] = min(filter(None, (_needed_length(tables), window)))
    host = str(merged["server"].get("host", InferenceConfig().server.host))
    port = merged["server"].get("port") or find_port(
        tables, host, find_server(tables)[1] + 1, "teacher_inference.server.port"
    )
    merged["server"]["port"] = port
    merged["name"] = "teacher_inference"
    if tables.is_section("teacher_inference"):
        tables.section("teacher_inference").update(merged)  # its source stays: it was given
    else:
        tables.set("teacher_inference", merged, TEACHER)
    tables.set(f"{TEACHER}.client.base_url", [build_url(host, port)], "teacher_inference.server")
    share_api_key(tables, TEACHER, "teacher_inference.server.api_key_var")


def _share_gpus(tables: ConfigTables) -> dict[str, int]:
    """Tensor parallelism as for the student; data parallelism over the rest of the teacher's GPUs."""
    ids = None if tables.get("inference.model.device") == "cpu" else tables.get("teacher_gpu_ids")
    num = len(ids) if isinstance(ids, list) else 1
    tp = math.gcd(int(tables.get("inference.parallel.tp", 1)), num)
    return {"tp": tp, "dp": num // tp}


def _needed_length(tables: ConfigTables) -> int:
    """Tokens for the longest sample and the longest context (at most its bytes; unknown contexts: at least seq_len)."""
    seq_len, sections = int(tables.get("seq_len")), _find_sections(tables)
    unknown = ("context_file", "context_template", "context_fn", "context_from")
    texts = [section.get(name) for section in sections for name in ("context", "context_template")]
    lengths = [len(text.encode()) + TEMPLATE_TOKENS for text in texts if isinstance(text, str)]
    if not lengths or any(section.get(name) is not None for section in sections for name in unknown):
        lengths.append(seq_len)
    return seq_len + max(lengths)
