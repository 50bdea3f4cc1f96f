"""A fake SGLang server: its HTTP protocol, according to its sources, over the embedded engine and a tiny model.

Written after SGLang's `http_server.py`, `io_struct.py`, `sampling_params.py`, `tokenizer_manager.py`, `sampler.py` and
`weight_versions.py` as of September 2026; unknown fields and values return 400, which is
stricter than the real server. Run it with `python tests/fakes/fake_sglang.py --model-path tiny-qwen3 --port 30000`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from prime_rl.inference.adapters import read_adapter
from prime_rl.inference.async_engine import AsyncEngine
from prime_rl.inference.detokenizer import build_decode
from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.engine import AdapterSpec, GenerationRequest, Output, SamplingParams
from prime_rl.inference.server import bind
from prime_rl.runtime.tokenizer import load_tokenizer, resolve_model_dir
from prime_rl.trainer.models.registry import load_decoder, load_eos_ids, read_tensors

GENERATE_FIELDS = set(
    "rid text input_ids sampling_params return_logprob logprob_start_len top_logprobs_num token_ids_logprob "
    "return_text_in_logprobs stream lora_path log_metrics".split()
)
SAMPLING_FIELDS = set(
    "max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty "
    "repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos skip_special_tokens "
    "spaces_between_special_tokens no_stop_trim custom_params stream_interval logit_bias sampling_seed".split()
)
UPDATE_FIELDS = set(
    "model_path load_format abort_all_requests weight_version is_async torch_empty_cache keep_pause "
    "recapture_cuda_graph token_step flush_cache manifest".split()
)


class Refused(Exception):
    """Answered with 400."""


def known(body: dict[str, Any], fields: set[str], required: set[str] = frozenset()) -> dict[str, Any]:  # type: ignore[assignment]
    if unknown := set(body) - fields:
        raise Refused(f"Unexpected field {sorted(unknown)}")
    if missing := required - set(body):
        raise Refused(f"Missing required field {sorted(missing)}")
    return body


def read_sampling(fields: dict[str, Any]) -> SamplingParams:
    """Validate SGLang's sampling parameters as it does, and convert them."""
    known(fields, SAMPLING_FIELDS)
    temperature, top_k = fields.get("temperature", 1.0), fields.get("top_k", -1)
    checks = {
        "temperature": math.isfinite(temperature) and temperature >= 0,
        "top_p": 0 < fields.get("top_p", 1.0) <= 1,
        "min_p": 0 <= fields.get("min_p", 0.0) <= 1,
        "top_k": top_k == -1 or top_k >= 1,
        "repetition_penalty": fields.get("repetition_penalty", 1.0) == 1,
        "min_new_tokens": 0 <= fields.get("min_new_tokens", 0) <= fields.get("max_new_tokens", 128),
        "sampling_seed": 0 <= fields.get("sampling_seed", 0) < 2**31,
        "n": fields.get("n", 1) == 1,
    }
    if wrong := [name for name, fine in checks.items() if not fine]:
        raise Refused(f"{wrong[0]} is out of range: {fields.get(wrong[0])}")
    stop = fields.get("stop") or []
    return SamplingParams(
        max_tokens=max(fields.get("max_new_tokens", 128), 1),  # the first token is sampled before the limit is checked
        temperature=0.0 if temperature < 1e-6 else temperature,
        top_p=fields.get("top_p", 1.0),
        top_k=top_k,
        min_p=fields.get("min_p", 0.0),
        presence_penalty=fields.get("presence_penalty", 0.0),
        frequency_penalty=fields.get("frequency_penalty", 0.0),
        min_tokens=fields.get("min_new_tokens", 0),
        seed=fields.get("sampling_seed", 0),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(fields.get("stop_token_ids") or ()),
        ignore_eos=fields.get("ignore_eos", False),
        logit_bias=tuple((int(token), value) for token, value in (fields.get("logit_bias") or {}).items()),
    )


@dataclass
class FakeSGLang:
    """`original`: SGLANG_RETURN_ORIGINAL_LOGPROB is set; `wrong`: loads wrong weights from paths that contain it;
    `full`: number of requests that get HTTP 503."""

    model_path: str
    port: int = 0
    seed: int = 7
    context_length: int = 512
    original: bool = False
    enable_lora: bool = True
    deterministic: bool = True
    api_key: str | None = None
    wrong: str = ""
    calls: list[str] = field(default_factory=list)
    paused: bool = False
    full: int = 0

    def __post_init__(self) -> None:
        directory = resolve_model_dir(self.model_path)
        tokenizer = load_tokenizer(self.model_path)
        model = load_decoder(directory, random_init=not list(directory.glob("*.safetensors")), seed=self.seed)
        self.embedded = EmbeddedEngine(
            model,
            eos_ids=load_eos_ids(directory),
            decode=build_decode(tokenizer),
            max_model_len=self.context_length,
            max_running=32,
            speculation=False,  # so that a request runs long enough to be paused
        )
        self.decode = build_decode(tokenizer)
        self.engine = AsyncEngine(self.embedded)
        self.labels = ["default"]
        self.running: dict[str, asyncio.Task[Any]] = {}
        self.using: Counter[str] = Counter()
        self._socket = bind("127.0.0.1", self.port)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        settings = uvicorn.Config(self.build_app(), log_level="error", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(settings)

    def start(self) -> FakeSGLang:
        self._thread = threading.Thread(target=self.serve, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        return self

    def serve(self) -> None:
        self._server.run([self._socket])

    def freeze(self) -> None:
        """Never respond to running requests."""
        self.engine._thread.pause().result()

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def build_app(self) -> Starlette:
        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self.engine.start()
            yield
            await asyncio.to_thread(self.engine.close)

        def guarded(handler: Any) -> Any:
            async def handle(request: Request) -> Response:
                self.calls.append(request.url.path)
                if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
                    return JSONResponse({"error": "Unauthorized"}, 401)
                try:
                    raw = await request.body()
                    found: Response = await handler(json.loads(raw) if raw else {})
                    return found
                except Refused as error:
                    return JSONResponse({"error": {"message": str(error)}}, 400)

            return handle

        table = {
            ("GET", "/health"): self.health,
            ("GET", "/health_generate"): self.health,
            ("GET", "/model_info"): self.model_info,
            ("GET", "/server_info"): self.server_info,
            ("POST", "/generate"): self.generate,
            ("POST", "/abort_request"): self.abort_request,
            ("POST", "/pause_generation"): self.pause_generation,
            ("POST", "/continue_generation"): self.continue_generation,
            ("POST", "/update_weights_from_disk"): self.update_weights_from_disk,
            ("POST", "/update_weight_version"): self.update_weight_version,
            ("POST", "/load_lora_adapter"): self.load_lora_adapter,
            ("POST", "/unload_lora_adapter"): self.unload_lora_adapter,
        }
        routes = [Route(path, guarded(handler), methods=[method]) for (method, path), handler in table.items()]
        return Starlette(routes=routes, lifespan=lifespan)

    async def health(self, body: dict[str, Any]) -> Response:
        return PlainTextResponse("")

    async def model_info(self, body: dict[str, Any]) -> Response:
        fields = {"model_path": self.model_path, "tokenizer_path": self.model_path, "is_generation": True}
        return JSONResponse({**fields, "weight_version": self.labels[-1]})

    async def server_info(self, body: dict[str, Any]) -> Response:
        fields = {"model_path": self.model_path, "dtype": "float32", "context_length": self.context_length}
        fields |= {"enable_deterministic_inference": self.deterministic, "enable_lora": self.enable_lora}
        return JSONResponse({**fields, "version": "0.0.0-fake", "internal_states": [{}]})

    async def generate(self, body: dict[str, Any]) -> Response:
        known(body, GENERATE_FIELDS, {"input_ids"})
        if self.full:
            self.full -= 1
            return JSONResponse({"error": {"message": "The request queue is full."}}, 503)
        rid, fields = body.get("rid") or uuid.uuid4().hex, body.get("sampling_params") or {}
        if not self.deterministic and "sampling_seed" in fields:  # as servers before 0.5.3
            raise Refused("Unexpected keyword argument 'sampling_seed'")
        params, ids = read_sampling(fields), body["input_ids"]
        if len(ids) + fields.get("max_new_tokens", 128) >= self.context_length:
            raise Refused(f"Requested token count exceeds the model's maximum context length of {self.context_length}")
        name = body.get("lora_path")
        if name is not None and name not in self.embedded.adapters():
            raise Refused(f"The following requested LoRA adapters are not loaded: {name}")
        start, wants = body.get("logprob_start_len", -1), body.get("return_logprob", False)
        tops = body.get("top_logprobs_num", 0) if wants else 0
        params = replace(params, top_logprobs=tops)
        if wants and -1 < start < len(ids) - 1:
            params = replace(params, prompt_logprobs=tops, prompt_start=start + 1)
        request = GenerationRequest(ids, params, adapter=name)
        self.using[name or ""] += 1
        task = asyncio.ensure_future(self.engine.generate([request]))
        self.running[rid] = task
        try:
            [output] = await task
        except asyncio.CancelledError:
            if self._server.should_exit or not task.cancelled():  # not aborted by a client: the server is stopping
                raise
            output = Output(request, [], [], [], [], "abort")
        finally:
            self.running.pop(rid, None)
            self.using[name or ""] -= 1
        return JSONResponse(await self.answer(output, rid, body))

    async def answer(self, output: Output, rid: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON of /generate."""
        request = output.request
        label = self.labels[output.versions[-1][1]] if output.versions else self.labels[-1]
        if request.adapter is not None:
            label = self.labels[-1]  # of the weights below
        limit = (body.get("sampling_params") or {}).get("max_new_tokens", 128)
        reason: dict[str, Any] = {"type": output.finish_reason}
        if output.finish_reason == "stop":
            reason["matched"] = output.token_ids[-1] if output.stop_reason is None else output.stop_reason
        elif output.finish_reason == "length":
            reason["length"] = limit
        else:
            reason["message"] = "Aborted"
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": reason,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(output.token_ids),
            "cached_tokens": output.num_cached,
            "weight_version": label,
            "e2e_latency": 0.1,
        }
        if body.get("return_logprob"):
            meta |= await self.tell_logprobs(output, body)
        text = output.text if output.text is not None else self.decode(output.token_ids, True)
        return {"text": text, "output_ids": output.token_ids, "meta_info": meta}

    async def tell_logprobs(self, output: Output, body: dict[str, Any]) -> dict[str, Any]:
        request, params = output.request, output.request.params
        logprobs, tops = output.logprobs, output.top_logprobs
        if output.token_ids and self.original and params.temperature:
            scoring = SamplingParams(
                max_tokens=0,
                prompt_logprobs=params.top_logprobs,
                prompt_temperature=1.0,
                prompt_start=len(request.prompt),
            )
            [scored] = await self.engine.generate([GenerationRequest(request.prompt + output.token_ids, scoring)])
            assert scored.prompt_logprobs is not None
            logprobs, tops = scored.prompt_logprobs.logprobs, scored.prompt_logprobs.top_logprobs

        def row(logprob: float | None, token: int) -> list[Any]:
            return [logprob, token, None]

        def table(rows: Any) -> list[Any]:
            return [[row(value, token) for token, value in top] for top in rows]

        start = body.get("logprob_start_len", -1)
        start = len(request.prompt) - 1 if start < 0 else start
        last = self.embedded.vocab_size - 1
        fields = [token if token < last else 0 for token in request.prompt[start:]]  # as the real one does
        found = output.prompt_logprobs
        scores = [] if found is None else found.logprobs
        meta: dict[str, Any] = {
            "input_token_logprobs": [row(value, token) for value, token in zip([None, *scores], fields, strict=False)],
            "output_token_logprobs": [row(*pair) for pair in zip(logprobs, output.token_ids, strict=True)],
        }
        if params.top_logprobs:
            meta["input_top_logprobs"] = [None, *table([] if found is None else found.top_logprobs)]
            meta["output_top_logprobs"] = table(tops)
        return meta

    async def abort_request(self, body: dict[str, Any]) -> Response:
        known(body, {"rid", "abort_all", "finished_reason", "abort_message"})
        if body.get("abort_all"):
            await self.engine.pause(abort=True)
            if not self.paused:
                await self.engine.resume()
        elif task := self.running.get(body.get("rid", "")):
            task.cancel()
        return Response()

    async def pause_generation(self, body: dict[str, Any]) -> Response:
        mode = known(body, {"mode"}).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise Refused("mode")
        self.paused = True
        await self.engine.pause(abort=mode == "abort")
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, body: dict[str, Any]) -> Response:
        known(body, {"torch_empty_cache"})
        self.paused = False
        await self.engine.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights_from_disk(self, body: dict[str, Any]) -> Response:
        known(body, UPDATE_FIELDS, {"model_path"})
        if self.engine.num_requests and not self.paused:
            return JSONResponse({"success": False, "message": "Cache flush failed after updating weights"}, 400)
        try:
            tensors = await asyncio.to_thread(read_tensors, Path(body["model_path"]))
        except (OSError, ValueError) as error:
            return JSONResponse({"success": False, "message": f"Failed to get weights iterator: {error}"}, 400)
        if self.wrong and self.wrong in body["model_path"]:
            tensors = {name: tensor * 1.5 if "mlp.down_proj" in name else tensor for name, tensor in tensors.items()}
        self.labels.append(body.get("weight_version") or self.labels[-1])
        number = len(self.labels) - 1
        await self.engine.call(lambda engine: engine.load_weights(tensors, number))
        self.model_path = body["model_path"]
        fields = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        return JSONResponse(fields)

    async def update_weight_version(self, body: dict[str, Any]) -> Response:
        known(body, {"new_version", "abort_all_requests"}, {"new_version"})
        self.labels[-1] = body["new_version"]
        return JSONResponse({"success": True, "message": "Weight version updated", "new_version": body["new_version"]})

    async def load_lora_adapter(self, body: dict[str, Any]) -> Response:
        known(body, {"lora_name", "lora_path", "pinned", "lora_id"}, {"lora_name", "lora_path"})
        if not self.enable_lora:
            message = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
            return JSONResponse({"success": False, "error_message": message}, 400)
        name = body["lora_name"]
        if name in self.embedded.adapters():
            return JSONResponse({"success": False, "error_message": f"LoRA {name} is loaded already"}, 400)
        tensors, found = read_adapter(Path(body["lora_path"]), 0)
        if self.wrong and self.wrong in body["lora_path"]:
            tensors = {key: tensor * 30 for key, tensor in tensors.items()}
        spec = AdapterSpec(found.rank, found.alpha, len(self.labels) - 1)
        await self.engine.call(lambda engine: engine.load_adapter(name, tensors, spec))
        return JSONResponse({"success": True, "loaded_adapters": {name: body["lora_path"]}})

    async def unload_lora_adapter(self, body: dict[str, Any]) -> Response:
        name = known(body, {"lora_name", "lora_id"}, {"lora_name"})["lora_name"]
        while self.using[name]:
            await asyncio.sleep(0.01)
        await self.engine.remove_adapter(name)
        return JSONResponse({"success": True, "loaded_adapters": {}})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--context-length", type=int, default=512)
    options = parser.parse_args()
    FakeSGLang(options.model_path, options.port, context_length=options.context_length).serve()
