"""Fuzzing: every input gives a value or an error message, never a crash.

More examples than the default: FUZZ_EXAMPLES=20000 pytest tests/unit/repository/test_fuzz.py
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running_server import RunningServer

from prime_rl.config import RLConfig
from prime_rl.inference.config import InferenceConfig
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.trainer.config import SFTConfig, TrainConfig
from prime_rl.transport.batches import decode_batch, encode_batch
from prime_rl.transport.canary import read_canary
from prime_rl.transport.weights import check_directory
from prime_rl.utils.pydantic_config import BaseConfig, parse_argv
from rollouts.training.manifests import read_manifest
from rollouts.training.metrics import load_jsonl
from rollouts.training.steps import find_damage
from rollouts.training.types import Sample

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "8"))
fuzz = settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.just("auto"),
    st.just(-1),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
CONFIGS: list[type[BaseConfig]] = [RLConfig, TrainConfig, SFTConfig, OrchestratorConfig, InferenceConfig]


def find_keys(config: type[BaseConfig], prefix: str = "", depth: int = 3) -> list[str]:
    """Dotted keys of a config, sections included."""
    found = []
    for name, field in config.model_fields.items():
        found.append(prefix + name)
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for kind in kinds if depth else ():
            if isinstance(kind, type) and issubclass(kind, BaseConfig):
                found += find_keys(kind, f"{prefix}{name}.", depth - 1)
    return found


KEYS = {config: find_keys(config) for config in CONFIGS}


@fuzz
@given(data=st.data())
def test_random_command_lines_are_parsed_or_rejected(data: st.DataObject) -> None:
    config = data.draw(st.sampled_from(CONFIGS))
    argv = []
    for key in data.draw(st.lists(st.sampled_from(KEYS[config]), min_size=1, max_size=4)):
        value = data.draw(values)
        text = value if isinstance(value, str) else json.dumps(value)
        argv += [data.draw(st.sampled_from([f"--{key}", f"--{key.replace('_', '-')}", f"--no-{key}"])), text]
    try:
        parse_argv(config, argv, "fuzz")
    except ValueError as error:
        assert str(error), "an error has a message"


@fuzz
@given(data=st.data())
def test_random_config_files_are_parsed_or_rejected(data: st.DataObject) -> None:
    config = data.draw(st.sampled_from(CONFIGS))
    lines = []
    for key in data.draw(st.lists(st.sampled_from(KEYS[config]), max_size=4)):
        lines.append(f"{key} = {json.dumps(data.draw(values))}")
    text = "\n".join(lines) + data.draw(
        st.sampled_from(["", "\n", "\n[", "\nx", "\n\x00", "\n[[env]]\n", "\n[log]\nx=1"])
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzz.toml"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            parse_argv(config, ["@", str(path)], "fuzz")
        except ValueError as error:
            assert str(error)


BATCH = encode_batch(
    3, [Sample(prompt="p", tokens=[1, 2, 3], loss_mask=[0, 1.0, 1.0], inference_logprobs=[0, -1.0, -2.0])]
)
MANIFEST = b'{"schema":1,"step":4,"tensors":{"w":{"dtype":"float32","shape":[2],"digest":"aa"}}}'
HEADER = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
SAFETENSORS = len(HEADER).to_bytes(8, "little") + HEADER + b"\0" * 8
CANARY = b'{"schema":2,"step":1,"prompts":[{"token_ids":[1,2],"logprobs":[-1.0]}],"dtype":"float32","exact":true}'
READERS: dict[str, tuple[bytes, Callable[[Path], object]]] = {
    "batch.msgpack": (BATCH, lambda root: decode_batch((root / "batch.msgpack").read_bytes())),
    "manifest.json": (MANIFEST, read_manifest),
    "model.safetensors": (SAFETENSORS, check_directory),
    "STABLE": (b'{"state.json": [3, "aa"]}', find_damage),
    "metrics.jsonl": (b'{"step": 1}\n{"step": 2}\n', lambda root: list(load_jsonl(root / "metrics.jsonl"))),
    "canary.json": (CANARY, read_canary),
}


def mutate(data: st.DataObject, original: bytes) -> bytes:
    """Some bytes changed, removed or added; or other bytes altogether."""
    if data.draw(st.booleans()):
        changed = bytearray(original)
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(changed)))
            changed[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        return bytes(changed)
    return data.draw(st.binary(max_size=64) | values.map(lambda value: json.dumps(value).encode()))


@pytest.mark.parametrize("name", READERS)
@fuzz
@given(data=st.data())
def test_file_of_random_bytes_is_parsed_or_rejected(name: str, data: st.DataObject) -> None:
    original, read = READERS[name]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "manifest.json").write_bytes(MANIFEST)
        (root / name).write_bytes(mutate(data, original))
        try:
            read(root)
        except ValueError as error:
            assert str(error)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer(None)
    yield running
    running.stop()


FIELDS = (
    "prompt messages tokens n max_tokens max_completion_tokens temperature top_p top_k min_p seed stop logprobs "
    "top_logprobs logit_bias stream model echo min_tokens ignore_eos tools tool_choice prompt_logprobs weight_dir "
    "lora_name lora_path start seeds return_token_ids add_generation_prompt chat_template_kwargs"
).split()
PATHS = (
    "/v1/completions /v1/chat/completions /v1/chat/completions/tokens /v1/chat/completions/group /tokenize /detokenize "
    "/score /update_weights /v1/load_lora_adapter /v1/unload_lora_adapter /init_broadcaster"
).split()
talk = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool", "", "x"]), "content": values}), max_size=3
)


@fuzz
@given(data=st.data())
def test_a_request_of_any_kind_is_answered_and_never_500(data: st.DataObject, server: RunningServer) -> None:
    body = data.draw(st.dictionaries(st.sampled_from(FIELDS), values, max_size=4))
    if data.draw(st.booleans()):
        body |= {"messages": data.draw(talk), "max_completion_tokens": data.draw(st.integers(0, 3))}
    else:
        body |= {"prompt": data.draw(st.text(max_size=5) | st.lists(st.integers(-1, 300), max_size=4)), "max_tokens": 2}
    try:
        content = json.dumps(body).encode()
    except ValueError:
        return
    reply = server.http.post(data.draw(st.sampled_from(PATHS)), content=content)
    assert reply.status_code < 500, (body, reply.text)


def test_the_server_lives_after_all_of_them(server: RunningServer) -> None:
    assert server.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 2}).status_code == 200
    assert server.metric("requests_running") == 0
