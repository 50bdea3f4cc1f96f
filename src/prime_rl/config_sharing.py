"""Keys of `rl` that several processes share, and keys that follow from those of another process."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

from prime_rl.configuration.merge import TRUE_WORDS
from prime_rl.configuration.schema import FieldSchema, child, default_of, fields_of, section_schema
from prime_rl.configuration.tables import ConfigTables
from prime_rl.inference.config import InferenceConfig
from prime_rl.orchestrator.config import TrainEnvConfig
from prime_rl.runtime.http_access import LOOPBACK
from prime_rl.runtime.machine import check_port_free
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.model_config import LoraConfig
from rollouts.training.objectives import PRESETS, AdvantageChoice, Objective

TRACKERS = ("wandb", "tensorboard", "trackio", "prometheus")
ANY_ADDRESS = ("0.0.0.0", "::")
THIS_MACHINE = (*LOOPBACK, *ANY_ADDRESS)
MAX_PORTS = 100
OVERLONG_SHARE = 5
"""The overlong penalty ramps up over the last 1/5 of max_tokens (DAPO: 4096 of 20480)."""


@dataclass(frozen=True)
class Shared:
    """A key of `rl` and the process keys that take its value."""

    key: str
    targets: tuple[str, ...]
    must_agree: bool = True
    """Whether a value given for one process applies to all of them."""


def _rows(section: str, names: str, processes: str, must_agree: bool = True) -> list[Shared]:
    """Rows for several keys that have the same name in every process."""
    return [
        Shared(f"{section}{name}", tuple(f"{process}.{section}{name}" for process in processes.split()), must_agree)
        for name in names.split()
    ]


SHARED_KEYS = (
    *_rows("model.", "name", "trainer orchestrator inference"),
    *_rows("model.debug.", "random_init num_layers seed", "trainer inference"),
    *_rows("", "max_steps max_async_level", "trainer orchestrator"),
    Shared("seq_len", ("trainer.model.seq_len", "orchestrator.seq_len")),
    *_rows("", "seed output_dir", "trainer orchestrator inference"),
    *_rows("transport.", "type host port", "trainer orchestrator"),
    *_rows("weight_broadcast.", "type delta", "trainer orchestrator inference"),
    *_rows("weight_broadcast.", "host port timeout anchor_interval", "trainer"),
    *_rows("ckpt.", "interval resume_step keep", "trainer orchestrator"),
    *_rows("wandb.", "enabled project entity offline group tags", "trainer orchestrator", must_agree=False),
    *_rows("wandb.log_extras.", "samples distributions interval max_samples", "trainer orchestrator", must_agree=False),
    *_rows("tensorboard.", "enabled", "trainer orchestrator", must_agree=False),
    *_rows("trackio.", "enabled project name space_id", "trainer orchestrator", must_agree=False),
    *_rows("prometheus.", "enabled", "trainer orchestrator", must_agree=False),
    *_rows("log.", "level file", "trainer orchestrator inference", must_agree=False),
)


def share_keys(tables: ConfigTables, defaults: BaseModel) -> None:
    """Copy shared keys to the processes, and keys that must agree from one process to the others.

    `defaults` has the defaults of `rl`. Raises `ValueError` if two values disagree.
    """
    if str(tables.get("resume")).lower() == "true":
        _resume_from_latest(tables)
    _share_ckpt_section(tables)
    for section in TRACKERS:
        _share_tracker(tables, section)
    _group_wandb_runs(tables, defaults)
    for row in SHARED_KEYS:
        if not row.key.startswith("ckpt.") or tables.is_section("ckpt"):
            _share(tables, row, defaults)
    name = tables.get("wandb.name")
    for process in ("trainer", "orchestrator"):
        own = f"{process}.wandb.name"
        if tables.replaces("wandb.name", own) or (name and not tables.is_set(own)):
            tables.set(own, name and f"{name}-{process}", "shared key wandb.name")


def _resume_from_latest(tables: ConfigTables) -> None:
    """Resume from the latest checkpoint, unless one is named; `ValueError` if checkpoints are switched off as well.

    `--resume` replaces one that is named in a file.
    """
    sections = ("ckpt", "trainer.ckpt", "orchestrator.ckpt")
    for section in filter(tables.is_off, sections):
        if tables.is_option(section) or tables.source(section) == tables.source("resume"):
            raise ValueError(f"{tables.show(section)} but resume needs checkpoints: leave one of them out")
        tables.set(section, {}, "resume")
    named = [key for key in (f"{section}.resume_step" for section in sections) if tables.has(key)]
    if not all(tables.replaces("resume", key) for key in named):
        return
    if named and tables.get(named[0]) != -1:
        tables.note(f"{tables.show('resume')} replaces {tables.show(named[0])}")
    for section in ("ckpt", *filter(tables.is_section, sections[1:])):
        tables.set(f"{section}.resume_step", -1, "resume")


def _share_tracker(tables: ConfigTables, section: str) -> None:
    """Switch a tracker on in processes that lack its section; an option switches it on or off in both."""
    is_on = tables.is_section(section)
    for target in (f"trainer.{section}", f"orchestrator.{section}"):
        if is_on == tables.is_section(target):
            continue
        if tables.replaces(section, target):
            tables.note(f"{tables.show(section)} replaces {tables.show(target)}")
        elif not is_on or tables.is_set(target):
            continue
        tables.set(target, {} if is_on else None, f"shared key {section}")


def _group_wandb_runs(tables: ConfigTables, defaults: BaseModel) -> None:
    """Put the W&B runs of both processes into one group: that of a process, else wandb.name or output_dir."""
    given = {tables.get(f"{process}.wandb.group") for process in ("trainer", "orchestrator")} - {None}
    if not tables.is_section("wandb") or tables.has("wandb.group") or len(given) > 1:
        return
    key = "wandb.name" if tables.has("wandb.name") else "output_dir"
    group = tables.get(key) or _find_default(defaults, key)
    source = f"follows from {key}"
    if given:
        group, source = given.pop(), "group of a process"
    tables.set("wandb.group", str(group), source)
    for process in ("trainer", "orchestrator"):
        if not tables.has(f"{process}.wandb.group"):
            tables.set(f"{process}.wandb.group", str(group), "shared key wandb.group")


def _share_ckpt_section(tables: ConfigTables) -> None:
    """Switch checkpoints on or off in both processes."""
    row = Shared("ckpt", ("trainer.ckpt", "orchestrator.ckpt"))
    chosen = _choose(tables, row)
    for key in (row.key, *row.targets) if chosen else ():
        if not tables.has(chosen) or not tables.is_section(key):
            source = tables.source(chosen) if key in (chosen, row.key) else "shared key ckpt"
            tables.set(key, {} if tables.has(chosen) else None, source)


def _share(tables: ConfigTables, row: Shared, defaults: BaseModel) -> None:
    """Resolve one row of the table."""
    if not row.must_agree and (not tables.is_set(row.key) or _is_recorded_default(tables, row.key, defaults)):
        return
    chosen = _choose(tables, row)
    value = tables.get(chosen) if chosen else _find_default(defaults, row.key)
    for key in (row.key, *row.targets):
        if not chosen:
            tables.set(key, value, "default")
        elif not (tables.is_set(key) and _is_same(tables.get(key), value)):
            tables.set(key, value, tables.source(chosen) if key == row.key else f"shared key {row.key}")


def _choose(tables: ConfigTables, row: Shared) -> str:
    """The key whose value applies, "" if none is set; `ValueError` if two values disagree.

    The shared key as an option overrides process keys in files, as options override files everywhere.
    """
    chosen, *others = [*filter(tables.is_set, (row.key, *row.targets))] or [""]
    for key in others:
        if _is_same(tables.get(key), tables.get(chosen)):
            continue
        if chosen == row.key and tables.replaces(chosen, key):
            tables.note(f"{tables.show(chosen)} replaces {tables.show(key)}")
            continue
        raise ValueError(
            f"{tables.show(chosen)} and {tables.show(key)} disagree\n  remove one of them; {row.key} alone sets all"
        )
    return chosen


def _is_recorded_default(tables: ConfigTables, key: str, defaults: BaseModel) -> bool:
    """Whether a file has the default of a key. The record of a run does, beside the values given for one process."""
    *sections, last = key.split(".")
    schema: FieldSchema | None = section_schema(type(defaults))
    for section in sections:
        schema = child(schema, section) if schema else None
    return schema is not None and not tables.is_option(key) and tables.get(key) == default_of(fields_of(schema)[last])


def _find_default(defaults: BaseModel, key: str) -> Any:
    """The default of a key; an optional section is off by default, and so are its keys."""
    value: Any = defaults
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def derive_keys(tables: ConfigTables) -> None:
    """Set the keys by which the processes fit together; explicit ones stay, or raise `ValueError` if they cannot."""
    _connect_inference(tables)
    _switch_off_fake_data(tables)
    _derive_env_losses(tables)
    _derive_advantage(tables)
    _derive_loss_divisor(tables)
    _derive_lr(tables)
    _ignore_gpu_keys_on_cpu(tables)


def _connect_inference(tables: ConfigTables) -> None:
    """Point the orchestrator to the server that rl starts; set its maximum length and LoRA rank from the trainer."""
    if tables.is_off("inference"):
        return
    if not tables.has("inference.model.max_model_len"):
        tables.set("inference.model.max_model_len", tables.get("seq_len"), "shared key seq_len")
    if has_adapter(tables) and not tables.is_set("inference.max_lora_rank"):
        rank = tables.get("trainer.model.lora.rank", LoraConfig().rank)
        tables.set("inference.max_lora_rank", rank, "trainer.model.lora.rank")
    share_api_key(tables, "orchestrator", "inference.server.api_key_var")
    urls = tables.get("orchestrator.client.base_url")
    host, port = find_server(tables)
    is_local = tables.get("deployment.type", "local") == "local"
    if is_local and urls is None and not tables.has("inference.server.port"):
        free = find_port(tables, host, port, "inference.server.port")
        if free != port:
            tables.note(f"port {port} is in use: the inference server listens on {free} (inference.server.port)")
            tables.set("inference.server.port", free, f"port {port} is in use")
            port = free
    if urls is None:
        tables.set("orchestrator.client.base_url", [build_url(host, port)], "shared key inference.server")
    elif not any(_reaches(url, host, port) for url in ([urls] if isinstance(urls, str) else urls)):
        raise ValueError(
            f"{tables.show('orchestrator.client.base_url')} is not the server that rl starts on port {port}\n"
            "  leave it out, set inference.server.port to match, or start no server: --no-inference"
        )


def share_api_key(tables: ConfigTables, section: str, source: str) -> None:
    """Let the client of a section send the key of its server, which the variable at `source` has."""
    if tables.has(source) and not tables.has(f"{section}.client.api_key_var"):
        tables.set(f"{section}.client.api_key_var", tables.get(source), source)


def find_envs(tables: ConfigTables) -> dict[int, dict[str, Any]]:
    """The tables of the training environments by their place; entries of other types are rejected later."""
    envs = tables.get("orchestrator.env")
    return {i: env for i, env in enumerate(envs if isinstance(envs, list) else []) if isinstance(env, dict)}


def has_adapter(tables: ConfigTables) -> bool:
    """Whether the trained weights are served as an adapter."""
    return tables.is_section("trainer.model.lora") and not tables.get("trainer.model.lora.merge")


def find_server(tables: ConfigTables) -> tuple[str, int]:
    """Host and port of the inference server that rl starts."""
    server = InferenceConfig().server
    host, port = tables.get("inference.server.host", server.host), tables.get("inference.server.port", server.port)
    return str(host), int(port)


def find_port(tables: ConfigTables, host: str, first: int, key: str) -> int:
    """The first free port from `first` on, for the server whose port is `key`."""
    taken = tables.get("transport.port") if tables.get("transport.type") == "zmq" else None
    for number in range(first, min(first + MAX_PORTS, 65536)):
        if number == taken:
            continue
        with contextlib.suppress(ValueError):
            check_port_free(host, number)
            return number
    raise ValueError(f"no port from {first} on is free: set {key}")


def build_url(host: str, port: int) -> str:
    """Base URL of a server that listens on `host`, for clients on this machine."""
    address = "localhost" if host in ANY_ADDRESS else f"[{host}]" if ":" in host else host
    return f"http://{address}:{port}/v1"


def _reaches(url: str, host: str, port: int) -> bool:
    """Whether a URL points to a server on this host and port."""
    parts = urlsplit(url)
    is_near = parts.hostname in THIS_MACHINE and host in THIS_MACHINE
    return (parts.port or 80) == port and (parts.hostname == host or is_near)


def _switch_off_fake_data(tables: ConfigTables) -> None:
    if tables.get("trainer.bench") is True:
        raise ValueError("trainer.bench times the trainer alone, on fake data: run `trainer --bench` instead of rl")
    if tables.is_section("trainer.data.fake"):
        where = tables.source("trainer.data.fake")
        tables.set("trainer.data.fake", None, "rl")
        tables.note(f"[trainer.data.fake] ({where}) is off: rl trains on the orchestrator's samples")


def _derive_advantage(tables: ConfigTables) -> None:
    """Set the orchestrator's half of the preset `trainer.loss.type`, unless its keys are set explicitly."""
    name, max_tokens = tables.get("trainer.loss.type"), tables.get("orchestrator.sampling.max_tokens")
    preset = PRESETS.get(name) if isinstance(name, str) else None
    has_critic, source = tables.is_section("trainer.critic"), f"trainer.loss.type {name}"
    if has_critic:
        preset, source = preset or PRESETS["aipo"], "trainer.critic"
    elif preset is None or name == "custom":
        return
    choice, settings = preset.advantage, dict[str, Any]()
    if tables.get("orchestrator.advantage.length_weighted_mean") is not True:
        settings = {"advantage.baseline": choice.baseline}
    if tables.get("orchestrator.advantage.baseline") != "role":  # a role has no group to divide by
        settings["advantage.std"] = choice.std
    if tables.is_off("orchestrator.advantage"):
        settings = {"advantage": {}}
    if any(tables.get(f"orchestrator.advantage.{name}") for name in ("import_path", "rewards")):
        settings = {}
    elif has_critic:
        is_off = tables.is_off("orchestrator.advantage")
        settings = {} if is_off else {"advantage.baseline": "none", "advantage.std": "none"}
    env_choice = AdvantageChoice("none") if has_critic else choice
    for env in find_envs(tables).values():
        if isinstance(env.get("advantage"), dict) and (has_critic or "type" not in (env.get("loss") or {})):
            _fill_advantage(env, env_choice)
    is_unverified = str(tables.get("orchestrator.buffer.skip_verification")).lower() in TRUE_WORDS
    if choice.drop_equal and not is_unverified:  # without rewards all groups are equal
        settings["buffer.filters"] = [{"name": "zero_variance"}]
    if choice.overlong and (unshaped := _find_unshaped_advantage(tables)):
        tables.note(f"{name} with {unshaped} has no overlong penalty")
    elif choice.overlong and isinstance(max_tokens, int):
        settings["length_penalty"] = {"type": "overlong", "coef": 1.0, "window": max(1, max_tokens // OVERLONG_SHARE)}
    elif choice.overlong:
        tables.note(f"{name} without orchestrator.sampling.max_tokens has no overlong penalty")
    for key, value in settings.items():
        key = f"orchestrator.{key}"
        if not tables.is_set(key):
            tables.set(key, value, source)
        elif not _is_same(tables.get(key), value):
            tables.note(f"{tables.show(key)} overrides the {value!r} of {source}")


def _find_unshaped_advantage(tables: ConfigTables) -> str | None:
    """The first advantage, of the run or an environment, that takes no overlong penalty."""
    sections = {"orchestrator.advantage": tables.get("orchestrator.advantage")} | {
        f"orchestrator.env.{i}.advantage": env.get("advantage") for i, env in find_envs(tables).items()
    }
    for key, section in sections.items():
        if not isinstance(section, dict):
            continue
        for name, value in (("baseline", "role"), ("std", "mean")):
            if section.get(name) == value:
                return f"{key}.{name} {value}"
        for name in filter(section.get, ("import_path", "rewards")):
            return f"{key}.{name}"
    return None


def _derive_loss_divisor(tables: ConfigTables) -> None:
    """Set the divisor of the aggregation "constant" to the maximum length of a completion."""
    preset = PRESETS.get(str(tables.get("trainer.loss.type")), Objective("custom"))
    is_constant = tables.get("trainer.loss.loss_aggregation", preset.loss_aggregation) == "constant"
    max_tokens = tables.get("orchestrator.sampling.max_tokens")
    if is_constant and isinstance(max_tokens, int) and not tables.has("trainer.loss.max_tokens"):
        tables.set("trainer.loss.max_tokens", max_tokens, "orchestrator.sampling.max_tokens")


def _derive_env_losses(tables: ConfigTables) -> None:
    """Give the losses of environments to the trainer, and their presets' baselines to the orchestrator."""
    for i, env in find_envs(tables).items():
        loss = env.get("loss")
        if not isinstance(loss, dict):
            continue
        name, key = TrainEnvConfig.find_name(env), f"orchestrator.env.{i}.loss"
        longest = tables.get("orchestrator.sampling.max_tokens")
        preset = PRESETS.get(str(loss.get("type")), Objective("custom"))
        own = dict(loss)
        if loss.get("loss_aggregation", preset.loss_aggregation) == "constant" and isinstance(longest, int):
            own.setdefault("max_tokens", longest)
        tables.set("trainer.env_loss", {**tables.section("trainer.env_loss"), name: own}, key)
        choice = preset.advantage
        if "type" not in loss or tables.is_section("trainer.critic"):
            continue
        if choice.drop_equal or choice.overlong:
            tables.note(f"{key}.type {preset.name} sets no filter and no overlong penalty: these are for whole runs")
        _fill_advantage(env, choice)


def _fill_advantage(env: dict[str, Any], choice: AdvantageChoice) -> None:
    """Set baseline and deviation of an environment's advantage where they are not given and have an effect."""
    given = env.get("advantage") or {}
    if given.get("import_path") or given.get("rewards"):
        return
    baseline = {} if given.get("length_weighted_mean") else {"baseline": choice.baseline}
    std = {} if given.get("baseline") == "role" else {"std": choice.std}  # a role has no group to divide by
    env["advantage"] = {**baseline, **std, **given}


def _derive_lr(tables: ConfigTables) -> None:
    """Set the trainer's default learning rate here, where its key is known in full."""
    lora = tables.is_section("trainer.model.lora")
    if not tables.is_set("trainer.optim.lr"):
        source = f"default {'with' if lora else 'without'} LoRA"
        tables.set("trainer.optim.lr", TrainConfig.default_lr(lora=lora), source)


def _ignore_gpu_keys_on_cpu(tables: ConfigTables) -> None:
    """Ignore GPU settings, with a note, if the devices are set to the CPU."""
    on_cpu = tables.get("inference.model.device") == "cpu"
    if on_cpu and tables.get("inference.backend") != "vllm":
        for server in filter(tables.is_section, ("inference", "teacher_inference")):
            for key in (f"{server}.parallel.tp", f"{server}.parallel.dp"):
                if tables.is_set(key) and tables.get(key) != 1:
                    tables.note(f"{tables.show(key)} is for GPUs: one engine runs on the CPU")
                    tables.set(key, 1, "inference.model.device")
    if on_cpu and tables.get("trainer.model.device") == "cpu":
        for key in filter(tables.has, ("inference_gpu_ids", "teacher_gpu_ids", "trainer_gpu_ids")):
            tables.note(f"{key} are ignored: the devices are set to the CPU")


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, dict) or isinstance(right, dict):
        return isinstance(left, dict) == isinstance(right, dict)
    left, right = _drop_empty_keys(left), _drop_empty_keys(right)
    return left == right or str(left) == str(right)


def _drop_empty_keys(value: Any) -> Any:
    """A list of tables without keys that are None or empty, which a record has and a preset leaves out."""
    if not isinstance(value, list):
        return value
    return [
        {k: v for k, v in row.items() if v not in (None, {}, [])} if isinstance(row, dict) else row for row in value
    ]
