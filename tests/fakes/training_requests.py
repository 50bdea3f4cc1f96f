"""Requests of the `tinker` client, encoded and sent without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from starlette.testclient import TestClient

from prime_rl.training_api.config import ServeConfig
from prime_rl.training_api.serve import build_app, build_service
from prime_rl.training_api.service import TrainingService
from prime_rl.training_api.wire import CLASSES, FLOAT32, INT64

TOKENS = list(range(5, 25))
PROTO = {"content-type": "application/x-protobuf"}


def build_tensor(array: Any) -> Any:
    """A dense tensor of float32 or int64."""
    is_float = array.dtype.kind == "f"
    data = array.astype(np.float32 if is_float else np.int64).tobytes()
    return CLASSES["Tensor"](dense=data, dtype=FLOAT32 if is_float else INT64, shape=array.shape)


def build_pass(
    model_id: str,
    seq_id: int,
    data: Sequence[tuple[Sequence[int], Mapping[str, Any]]],
    loss_fn: str = "cross_entropy",
    config: Mapping[str, float] | None = None,
    *,
    forward_only: bool = False,
) -> bytes:
    """A `forward_backward` body of (tokens, loss inputs)."""
    message = CLASSES["ForwardBackwardRequest"](
        model_id=model_id, seq_id=seq_id, loss_fn=loss_fn, forward_only=forward_only, loss_fn_config=config or {}
    )
    for tokens, inputs in data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(tokens, dtype=np.int32).tobytes()
        for name, array in inputs.items():
            datum.loss_fn_inputs[name].CopyFrom(build_tensor(array))
    return bytes(message.SerializeToString())


class Server:
    """The application, called with a key."""

    def __init__(self, client: TestClient, service: TrainingService) -> None:
        self.client, self.service = client, service
        self.session = self.post("create_session", {"tags": []})["session_id"]
        self.num_models = self.num_samplers = 0

    def call(self, method: str, path: str, key: str = "tml-a", **options: Any) -> Any:
        headers = {"x-api-key": key, **options.pop("headers", {})}
        return self.client.request(method, f"/api/v1/{path}", headers=headers, **options)

    def post(self, path: str, body: Any = None, key: str = "tml-a") -> Any:
        reply = self.call("POST", path, key, json=body or {})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def result(self, promise: dict[str, Any], key: str = "tml-a") -> Any:
        """The result of a request: a JSON object or protobuf bytes."""
        reply = self.call("POST", "retrieve_future", key, json={"request_id": promise["request_id"]})
        assert reply.status_code == 200, reply.text
        return reply.content if "protobuf" in reply.headers["content-type"] else reply.json()

    def create_model(self, **lora: Any) -> str:
        body = {"session_id": self.session, "model_seq_id": self.num_models, "base_model": "tiny-qwen3"}
        self.num_models += 1
        found = self.result(self.post("create_model", {**body, "lora_config": {"rank": 4, "seed": 1, **lora}}))
        return str(found["model_id"])

    def run_pass(self, model_id: str, seq_id: int, tokens: list[int] = TOKENS, **options: Any) -> Any:
        """Log-probs and loss of a sequence."""
        body = build_pass(model_id, seq_id, [(tokens[:-1], {"target_tokens": np.array(tokens[1:])})], **options)
        reply = self.call("POST", "forward_backward", content=body, headers=PROTO)
        assert reply.status_code == 200, reply.text
        found = self.result(reply.json())
        if isinstance(found, dict):
            return found
        message = CLASSES["ForwardBackwardOutput"].FromString(found)
        [record] = message.loss_fn_outputs
        logprobs = np.frombuffer(record.fields["logprobs"].data, dtype=np.float32)
        return logprobs, message.metrics["loss:sum"]

    def step(self, model_id: str, seq_id: int) -> Any:
        body = {"model_id": model_id, "seq_id": seq_id, "adam_params": {"learning_rate": 0.01}}
        return self.result(self.post("optim_step", body))

    def open_sampler(self, **fields: Any) -> str:
        body = {"session_id": self.session, "sampling_session_seq_id": 1000 + self.num_samplers, **fields}
        self.num_samplers += 1
        return str(self.post("create_sampling_session", body)["sampling_session_id"])

    def sample(self, sampler: str, seq_id: int, params: dict[str, Any], **fields: Any) -> Any:
        """The promise of a sample."""
        prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}
        body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": prompt, "sampling_params": params}
        return self.post("asample", {**body, **fields})

    def train_sampler(self) -> str:
        """A sampler of an adapter after two steps."""
        model_id = self.create_model()
        for step in range(2):
            self.run_pass(model_id, 1 + 2 * step)
            self.step(model_id, 2 + 2 * step)
        self.num_samplers += 1
        body = {"model_id": model_id, "seq_id": 5, "sampling_session_seq_id": self.num_samplers}
        return str(self.result(self.post("save_weights_for_sampler", body))["sampling_session_id"])

    def read_samples(self, sampler: str, seq_id: int, params: dict[str, Any], **fields: Any) -> Any:
        """The `SampleResponse`, without the cached tokens, which only the engine of this process reports."""
        found = self.result(self.sample(sampler, seq_id, params, **fields))
        assert isinstance(found, bytes), found
        message = CLASSES["SampleResponse"].FromString(found)
        message.prompt_cache_hit_tokens = 0
        return message


@contextmanager
def open_server(output_dir: Path, **config: Any) -> Iterator[Server]:
    """A server of the tiny model with random weights."""
    model = {"name": "tiny-qwen3", "debug": {"random_init": True}}
    service = build_service(ServeConfig.model_validate({"model": model, "output_dir": output_dir, **config}))
    with TestClient(build_app(service), base_url="http://127.0.0.1:8010") as client:
        yield Server(client, service)
