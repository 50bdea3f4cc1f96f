"""Configuration of `rl`: one section per process, and a table of the keys that they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from prime_rl.config_teacher import add_teacher
from prime_rl.configuration.sections import (
    DebugModelConfig,
    LogConfig,
    TensorboardConfig,
    TrackioConfig,
    TrainerWeightBroadcastConfig,
    TransportConfig,
    WandbConfig,
)
from prime_rl.deployment.config import Deployment, LocalDeployment
from prime_rl.inference.config import InferenceConfig
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.trainer.config import LoraConfig, TrainConfig
from prime_rl.utils.pydantic_config import BaseConfig, note, note_source
from rollouts.training.objectives import PRESETS

GpuIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
MISSING = object()
TRACKERS = ("wandb", "tensorboard", "trackio", "prometheus")
ANY_ADDRESS = ("0.0.0.0", "::")
OVERLONG_SHARE = 5
"""The overlong penalty ramps up over the last 1/5 of max_tokens (DAPO: 4096 of 20480)."""
LOOPBACK = ("localhost", "127.0.0.1", "::1", *ANY_ADDRESS)


@dataclass(frozen=True)
class Shared:
    """A key of `rl` and the process keys that take its value."""

    key: str
    targets: tuple[str, ...]
    must_agree: bool = True
    """Whether a value given for one process applies to all of them."""


def _rows(section: str, names: str, processes: str, below: str = "", must_agree: bool = True) -> list[Shared]:
    """Rows for several keys that have the same name in every process."""
    return [
        Shared(
            f"{section}{name}",
            tuple(f"{process}.{below}{section}{name}" for process in processes.split()),
            must_agree,
        )
        for name in names.split()
    ]


SHARED_KEYS = (
    *_rows("model.", "name", "trainer orchestrator inference"),
    *_rows("model.debug.", "random_init num_layers seed", "trainer inference"),
    *_rows("", "max_steps max_async_level", "trainer orchestrator"),
    Shared("seq_len", ("trainer.model.seq_len", "orchestrator.seq_len")),
    *_rows("", "seed output_dir", "trainer orchestrator inference"),
    *_rows("transport.", "type host port", "trainer orchestrator"),
    *_rows("weight_broadcast.", "type", "trainer orchestrator inference"),
    *_rows("weight_broadcast.", "host port timeout", "trainer"),
    *_rows("ckpt.", "interval resume_step keep", "trainer orchestrator"),
    *_rows("wandb.", "enabled project entity offline group tags", "trainer orchestrator", must_agree=False),
    *_rows("wandb.log_extras.", "samples distributions interval max_samples", "trainer orchestrator", must_agree=False),
    *_rows("tensorboard.", "enabled", "trainer orchestrator", must_agree=False),
    *_rows("trackio.", "enabled project name space_id", "trainer orchestrator", must_agree=False),
    *_rows("prometheus.", "enabled", "trainer orchestrator", must_agree=False),
    *_rows("log.", "level file", "trainer orchestrator inference", must_agree=False),
)


class SharedModelConfig(BaseConfig):
    """The model that is trained and served."""

    name: str = "Qwen/Qwen3-0.6B"
    """Directory, shipped name (tiny-qwen3) or hub name."""

    debug: DebugModelConfig = DebugModelConfig()


class SharedCkptConfig(BaseConfig):
    """Checkpoints of trainer and orchestrator, taken at the same steps."""

    interval: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; unset: only after the last step."""

    resume_step: int | None = Field(default=None, ge=-1)
    """Continue from this step; -1: from the latest complete one."""

    keep: int | None = Field(default=None, ge=1)
    """Number of latest checkpoints that stay on disk; unset: all."""


class SharedPrometheusConfig(BaseConfig):
    """Prometheus endpoints of trainer and orchestrator at 127.0.0.1, ports 9401 and 9402."""

    enabled: bool = True
    """Off keeps the section without listening."""


class RLConfig(BaseConfig):
    """Configuration of a whole run. A shared key applies to every process; a conflicting process key is an error."""

    spellings: ClassVar[Mapping[str, str]] = {"inspect_context": "orchestrator.teacher_model.inspect_context"}

    model: SharedModelConfig = SharedModelConfig()

    max_steps: int | None = Field(default=None, ge=1)
    """Number of optimizer steps; unset: until the run is stopped."""

    max_async_level: int = Field(default=2, ge=0)
    """Maximum lag of the sampling policy behind the trained one, in versions; 0: synchronous."""

    seq_len: int = Field(default=2048, ge=1)
    """Maximum sequence length (prompt + completion); also the length of a packed sequence."""

    seed: int = Field(default=42, ge=0)
    """Random seed of prompt order, sampling and initialization."""

    output_dir: Path = Path("outputs")
    """Directory of the run: configs, logs, rollouts, weights, checkpoints, metrics.jsonl, samples.jsonl."""

    resume: bool = False
    """Resume from the last step that trainer and orchestrator have both committed: ckpt.resume_step = -1."""

    max_restarts: int = Field(default=3, ge=0)
    """Maximum restarts of a crashed server (inference, teacher); one more crash stops the run."""

    hang_timeout: float | None = Field(default=300.0, gt=0)
    """Seconds without progress after which rl reports which process waits for which; off: never."""

    clean: bool = False
    """Remove the steps of an earlier run from output_dir; its metrics, samples and logs move to attempts/."""

    trainer_gpu_ids: GpuIds | None = None
    """GPUs of the trainer, as 0,1 or 0 1; unset: the first GPU that inference leaves free, or the CPU."""

    inference_gpu_ids: GpuIds | None = None
    """GPUs of the inference server; unset: the first GPU, or the CPU."""

    teacher_gpu_ids: GpuIds | None = None
    """GPUs of the teacher's server; unset: those that inference and trainer leave free, else those of inference."""

    deployment: Deployment = LocalDeployment()
    """Where the processes run: this machine, or one Slurm, Ray or Kubernetes job."""

    transport: TransportConfig = TransportConfig()

    weight_broadcast: TrainerWeightBroadcastConfig = TrainerWeightBroadcastConfig()

    ckpt: SharedCkptConfig | None = None

    wandb: WandbConfig | None = None

    tensorboard: TensorboardConfig | None = None

    trackio: TrackioConfig | None = None

    prometheus: SharedPrometheusConfig | None = None

    log: LogConfig = LogConfig()

    trainer: TrainConfig = TrainConfig()

    orchestrator: OrchestratorConfig = OrchestratorConfig()

    inference: InferenceConfig | None = InferenceConfig()
    """The server that rl starts; off: use the running server at orchestrator.client.base_url."""

    teacher_inference: InferenceConfig | None = None
    """The teacher's server: inherits the keys of inference, overridden here; its port follows that of inference."""

    @model_validator(mode="before")
    @classmethod
    def _share(cls, data: Any, info: ValidationInfo) -> Any:
        """Copy shared keys to the processes, and keys that must agree from one process to the others."""
        values = _Values(_plain(data), info)
        _resume(values)
        _share_sections(values)
        for row in SHARED_KEYS:
            values.share(row)
        _name_wandb_runs(values)
        _connect_inference(values)
        _switch_off_fake_data(values)
        _share_advantage(values)
        _ignore_gpu_keys_on_cpu(values)
        add_teacher(values)
        return values.data

    @field_validator("trainer_gpu_ids", "inference_gpu_ids", "teacher_gpu_ids")
    @classmethod
    def _check_gpu_ids(cls, ids: list[int] | None) -> list[int] | None:
        if ids and len(set(ids)) < len(ids):
            raise ValueError("contains a GPU id twice")
        return ids

    @model_validator(mode="after")
    def _check_teacher_is_used(self) -> RLConfig:
        loss, teacher = self.trainer.loss, self.orchestrator.teacher_model
        if teacher is None and loss.needs_teacher:
            raise ValueError(
                f"trainer.loss.{loss.needs_teacher} is {getattr(loss, loss.needs_teacher)} but there is no teacher: "
                "set [orchestrator.teacher_model]"
            )
        if teacher is not None and not loss.needs_teacher:
            raise ValueError(
                "orchestrator.teacher_model has no effect with trainer.loss.teacher_tau = 0: raise it, or leave the "
                "section out"
            )
        if teacher is not None and not self._teacher_differs():
            raise ValueError(
                "orchestrator.teacher_model has no context, so the teacher is the student itself\n"
                "  set orchestrator.teacher_model.context (or context_file, context_template, context_fn)"
            )
        if self.teacher_gpu_ids and self.teacher_inference is None:
            raise ValueError("teacher_gpu_ids is set but rl starts no teacher: remove it")
        return self

    def _teacher_differs(self) -> bool:
        """Whether the teacher has a context, is a reference for an environment, or is another model."""
        teacher, server = self.orchestrator.teacher_model, self.teacher_inference
        assert teacher is not None
        if teacher.source or any(env.source or env.teacher == "reference" for env in self.orchestrator.env):
            return True
        return server is None or server.model.name != self.model.name

    @model_validator(mode="after")
    def _check_processes_fit(self) -> RLConfig:
        if self.inference is None:
            if self.inference_gpu_ids:
                raise ValueError("inference_gpu_ids is set but inference is off: remove one of them")
            return self
        teacher = self.teacher_inference
        if (
            teacher is not None
            and teacher.sglang.base_url
            and teacher.sglang.base_url == self.inference.sglang.base_url
        ):
            raise ValueError(
                f"teacher_inference.sglang.base_url = {teacher.sglang.base_url} is the student's server, which "
                "serves one model: start a second one, or leave teacher_inference.backend out"
            )
        lora = self.trainer.model.lora
        if lora is not None and lora.modules_to_save and not lora.merge:
            raise ValueError(
                "trainer.model.lora.modules_to_save is fully fine-tuned, which an adapter cannot contain\n"
                "  set trainer.model.lora.merge = true to publish full models"
            )
        length = self.inference.model.max_model_len
        if length is not None and length > self.seq_len:
            raise ValueError(
                f"inference.model.max_model_len = {length} allows longer samples than seq_len = {self.seq_len}\n"
                "  raise seq_len, or leave inference.model.max_model_len out: it then follows seq_len"
            )
        return self


def given_gpus(config: RLConfig) -> dict[str, list[int]]:
    """The GPU ids set in the configuration."""
    keys = ("trainer_gpu_ids", "inference_gpu_ids", "teacher_gpu_ids")
    return {key: ids for key in keys if (ids := getattr(config, key))}


def has_versions(config: RLConfig) -> bool:
    """Whether the teacher's server receives weight updates."""
    teacher = config.orchestrator.teacher_model
    return teacher is not None and teacher.weights == "ema"


class _Values:
    """Raw config tables with access by dotted key and the source of each value."""

    def __init__(self, data: dict[str, Any], info: ValidationInfo) -> None:
        self.data = data
        self.info = info
        self.sources: Mapping[str, str] = info.context["sources"] if isinstance(info.context, dict) else {}

    def get(self, key: str) -> Any:
        """The value set for a key, or MISSING."""
        node: Any = self.data
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                return MISSING
            node = node[part]
        return node

    def has(self, key: str) -> bool:
        """Whether a key is set to a value other than None."""
        return self.get(key) not in (MISSING, None)

    def set(self, key: str, value: Any, source: str) -> None:
        """Set a key unless a parent section is off."""
        node = self.data
        *sections, last = key.split(".")
        for part in sections:
            node = node.setdefault(part, {})
            if node is None:
                return
        node[last] = value
        note_source(self.info, key, source)

    def source(self, key: str) -> str:
        """The source of a value."""
        return self.sources.get(key, "given")

    def show(self, key: str) -> str:
        """`key = value (source)`, for messages."""
        value = self.get(key)
        value = str(value) if isinstance(value, Path) else value
        shown = "on" if isinstance(value, dict) else "off" if value is None else repr(value)
        return f"{key} = {shown}" + (f" ({self.source(key)})" if key in self.sources else "")

    def share(self, row: Shared) -> None:
        """Resolve one row of the table."""
        if row.key.startswith("ckpt.") and not isinstance(self.get("ckpt"), dict):
            return
        given = [key for key in (row.key, *row.targets) if self.get(key) is not MISSING]
        if not row.must_agree and row.key not in given:
            return
        chosen = self.choose(row, given) if given else None
        value = self.get(chosen) if chosen else _default(row.key)
        for key in (row.key, *row.targets):
            if chosen is None:
                self.set(key, value, "default")
            elif key != chosen:
                self.set(key, value, self.source(chosen) if key == row.key else f"shared key {row.key}")

    def choose(self, row: Shared, given: list[str]) -> str:
        """The key whose value applies; `ValueError` if two values disagree.

        The shared key on the command line overrides process keys in files, as options override files everywhere.
        """
        chosen = given[0]
        for key in given[1:]:
            if _same(self.get(key), self.get(chosen)):
                continue
            if chosen == row.key and self.source(chosen) == "CLI" and self.source(key) not in ("CLI", "given"):
                note(self.info, f"note: {self.show(chosen)} replaces {self.show(key)}")
                continue
            raise ValueError(
                f"{self.show(chosen)} and {self.show(key)} disagree\n  remove one of them; {row.key} alone sets all"
            )
        return chosen


def _resume(values: _Values) -> None:
    """--resume means the latest checkpoint unless a step is given."""
    if str(values.get("resume")).lower() == "true" and not values.has("ckpt.resume_step"):
        values.set("ckpt.resume_step", -1, "resume")


def _share_sections(values: _Values) -> None:
    """Share optional sections: checkpoints go to both processes, trackers only to those that lack the section."""
    ckpt = Shared("ckpt", ("trainer.ckpt", "orchestrator.ckpt"))
    given = [key for key in (ckpt.key, *ckpt.targets) if values.get(key) is not MISSING]
    if given:
        chosen = values.choose(ckpt, given)
        for key in (ckpt.key, *ckpt.targets):
            if values.get(chosen) is None or not isinstance(values.get(key), dict):
                source = values.source(chosen) if key in (chosen, ckpt.key) else "shared key ckpt"
                values.set(key, None if values.get(chosen) is None else {}, source)
    for section in TRACKERS:
        for target in (f"trainer.{section}", f"orchestrator.{section}"):
            if isinstance(values.get(section), dict) and values.get(target) is MISSING:
                values.set(target, {}, f"shared key {section}")


def _name_wandb_runs(values: _Values) -> None:
    """Name the run of each process: shared name, then process name."""
    name = values.get("wandb.name")
    for process in ("trainer", "orchestrator"):
        if name not in (MISSING, None) and values.get(f"{process}.wandb.name") is MISSING:
            values.set(f"{process}.wandb.name", f"{name}-{process}", "shared key wandb.name")


def _connect_inference(values: _Values) -> None:
    """Point the orchestrator to the server that rl starts; set its maximum length and LoRA rank from the trainer."""
    if values.get("inference") is None:
        return
    if values.get("inference.model.max_model_len") in (MISSING, None):
        values.set("inference.model.max_model_len", values.get("seq_len"), "shared key seq_len")
    lora = values.get("trainer.model.lora")
    if isinstance(lora, dict) and not lora.get("merge") and values.get("inference.max_lora_rank") is MISSING:
        values.set("inference.max_lora_rank", lora.get("rank", LoraConfig().rank), "trainer.model.lora.rank")
    server = InferenceConfig().server
    host, port = values.get("inference.server.host"), values.get("inference.server.port")
    host = server.host if host is MISSING else str(host)
    port = server.port if port is MISSING else int(port)
    urls = values.get("orchestrator.client.base_url")
    if urls is MISSING:
        address = "localhost" if host in ANY_ADDRESS else f"[{host}]" if ":" in host else host
        values.set("orchestrator.client.base_url", [f"http://{address}:{port}/v1"], "shared key inference.server")
    elif not any(_reaches(url, host, port) for url in ([urls] if isinstance(urls, str) else urls)):
        raise ValueError(
            f"{values.show('orchestrator.client.base_url')} is not the server that rl starts on port {port}\n"
            "  leave it out, set inference.server.port to match, or start no server: --no-inference"
        )


def _reaches(url: str, host: str, port: int) -> bool:
    """Whether a URL points to a server on this host and port."""
    parts = urlsplit(url)
    return (parts.port or 80) == port and (parts.hostname == host or (parts.hostname in LOOPBACK and host in LOOPBACK))


def _ignore_gpu_keys_on_cpu(values: _Values) -> None:
    """Ignore GPU settings, with a note, if the devices are set to the CPU."""
    servers = [name for name in ("inference", "teacher_inference") if isinstance(values.get(name), dict)]
    on_cpu = values.get("inference.model.device") == "cpu"
    for server in servers if on_cpu and values.get("inference.backend") != "vllm" else ():
        for key in (f"{server}.parallel.tp", f"{server}.parallel.dp"):
            if values.get(key) not in (MISSING, 1):
                note(values.info, f"note: {values.show(key)} is for GPUs: one engine runs on the CPU")
                values.set(key, 1, "inference.model.device")
    if on_cpu and values.get("trainer.model.device") == "cpu":
        for key in ("inference_gpu_ids", "teacher_gpu_ids", "trainer_gpu_ids"):
            if values.has(key):
                note(values.info, f"note: {key} are ignored: the devices are set to the CPU")


def _switch_off_fake_data(values: _Values) -> None:
    if values.get("trainer.bench") is True:
        raise ValueError("trainer.bench times the trainer alone, on fake data: run `trainer --bench` instead of rl")
    if isinstance(values.get("trainer.data.fake"), dict):
        where = values.source("trainer.data.fake")
        values.set("trainer.data.fake", None, "rl")
        note(values.info, f"note: [trainer.data.fake] ({where}) is off: rl trains on the orchestrator's samples")


def _share_advantage(values: _Values) -> None:
    """Set the orchestrator's half of the preset `trainer.loss.type`, unless its keys are set explicitly."""
    name, max_tokens = values.get("trainer.loss.type"), values.get("orchestrator.sampling.max_tokens")
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is None or name == "custom":
        return
    choice, settings = preset.advantage, dict[str, Any]()
    if values.get("orchestrator.advantage.length_weighted_mean") is not True:
        settings = {"advantage.baseline": choice.baseline}
    settings["advantage.std"] = choice.std
    if values.get("orchestrator.advantage") is None:
        settings = {"advantage": {}}
    if choice.drop_equal:
        settings["buffer.filters"] = [{"name": "zero_variance"}]
    if choice.overlong and isinstance(max_tokens, int):
        settings["length_penalty"] = {"type": "overlong", "coef": 1.0, "window": max(1, max_tokens // OVERLONG_SHARE)}
    elif choice.overlong:
        note(values.info, f"note: {name} without orchestrator.sampling.max_tokens has no overlong penalty")
    for key, value in settings.items():
        key = f"orchestrator.{key}"
        if values.get(key) is MISSING:
            values.set(key, value, f"trainer.loss.type {name}")
        elif not _same(values.get(key), value):
            note(values.info, f"note: {values.show(key)} overrides the {value!r} of trainer.loss.type {name}")
    loss_aggregation = values.get("trainer.loss.loss_aggregation")
    by_constant = (preset.loss_aggregation if loss_aggregation in (MISSING, None) else loss_aggregation) == "constant"
    if by_constant and values.get("trainer.loss.max_tokens") in (MISSING, None) and isinstance(max_tokens, int):
        values.set("trainer.loss.max_tokens", max_tokens, "orchestrator.sampling.max_tokens")


def _default(key: str) -> Any:
    """The default of a key of `rl`."""
    section, _, name = key.rpartition(".")
    if section == "ckpt":
        return getattr(SharedCkptConfig(), name)
    owner: Any = _defaults()
    for part in key.split("."):
        owner = getattr(owner, part)
    return owner


@cache
def _defaults() -> RLConfig:
    """The defaults of `rl`, unvalidated and built once."""
    return RLConfig.model_construct()


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, dict) or isinstance(right, dict):
        return isinstance(left, dict) == isinstance(right, dict)
    return left == right or str(left) == str(right)


def _plain(data: Any) -> Any:
    """A copy as plain dicts, so that config objects are shared like parsed text."""
    if isinstance(data, BaseModel):
        return _plain(data.model_dump(exclude_unset=True))
    return {key: _plain(value) for key, value in data.items()} if isinstance(data, dict) else data
