"""Samples of the training API from an inference server: vLLM or the embedded engine, in another process or machine.

The server needs the same base model, LoRA, read access to the checkpoints below `output_dir`, and vLLM's route
`/inference/v1/generate`:

    inference --backend vllm --model.name smollm2 --max-lora-rank 32 --weight-dirs '["outputs/serve"]'
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
from loguru import logger

from prime_rl.client.http import HttpPool, Reply
from prime_rl.inference.engine import GenerationRequest, Output, PromptLogprobs, SamplingParams, TopLogprobs
from prime_rl.training_api.checkpoints import AdapterCheckpoint
from prime_rl.utils.client import RETRIED_STATUS

MAX_CONNECTIONS = 256
BAD_REQUEST, NOT_FOUND = 400, 404
RETRY_S = 1.0
"""Pause before a sample is repeated."""


class SamplingServerError(RuntimeError):
    """The inference server does not answer in time, or rejects a request."""


class Unavailable(SamplingServerError):
    """The inference server is unreachable or full, or has aborted a sample: it may be restarting."""


class ServerSampling:
    """Samples over HTTP; `find_directory` gives the PEFT directory of a checkpoint as the server sees it.

    A sample is repeated with its seed for `reconnect_s` seconds while the server is `Unavailable`.
    """

    def __init__(
        self,
        url: str,
        find_directory: Callable[[AdapterCheckpoint], Path],
        api_key: str | None,
        timeout_s: float,
        reconnect_s: float,
    ) -> None:
        self.url, self._find_directory, self._reconnect_s = url, find_directory, reconnect_s
        self._pool = HttpPool(url, max_connections=MAX_CONNECTIONS, timeout_s=timeout_s)
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._loaded: dict[str, AdapterCheckpoint] = {}
        self._is_available = True

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Output]:
        """See `SamplingBackend`; adapters that a restarted server has lost are loaded again."""
        running = [asyncio.create_task(self._generate(request)) for request in requests]
        try:
            return list(await asyncio.gather(*running))
        finally:  # after an error the server ends the others
            for task in running:
                task.cancel()

    async def _generate(self, request: GenerationRequest) -> Output:
        end: float | None = None
        while True:
            try:
                output = await self._try(request)
                self._is_available = True
                return output
            except Unavailable as error:
                end = end or time.monotonic() + self._reconnect_s
                if time.monotonic() >= end:
                    raise
                if self._is_available:
                    logger.warning(f"{error}; samples wait for {self._reconnect_s:g} s (sampling.reconnect_timeout)")
                self._is_available = False
            await asyncio.sleep(RETRY_S)

    async def _try(self, request: GenerationRequest) -> Output:
        body = build_body(request)
        reply = await self._post("/inference/v1/generate", body)
        if reply.status == NOT_FOUND and request.adapter in self._loaded:
            await self._load(self._loaded[request.adapter])
            reply = await self._post("/inference/v1/generate", body)
        output = parse_output(request, orjson.loads(self._check(reply, "sample").body))
        if output.finish_reason == "abort":
            raise Unavailable(f"{self.url} aborted a sample")
        return output

    async def load_adapter(self, checkpoint: AdapterCheckpoint) -> None:
        """See `SamplingBackend`; a server that is unavailable gets it with the next sample."""
        with suppress(Unavailable):
            await self._load(checkpoint)
        self._loaded[checkpoint.path] = checkpoint

    async def _load(self, checkpoint: AdapterCheckpoint) -> None:
        body = {"lora_name": checkpoint.path, "lora_path": str(self._find_directory(checkpoint).resolve())}
        self._check(await self._post("/v1/load_lora_adapter", body), "load an adapter")

    async def remove_adapter(self, path: str) -> None:
        """See `SamplingBackend`; a server that was restarted no longer has it."""
        self._loaded.pop(path, None)
        with suppress(Unavailable):
            await self._post("/v1/unload_lora_adapter", {"lora_name": path})

    async def _post(self, path: str, body: dict[str, Any]) -> Reply:
        try:
            return await self._pool.request("POST", path, orjson.dumps(body), self._headers)
        except (ConnectionError, TimeoutError) as error:
            kind = Unavailable if isinstance(error, ConnectionError) else SamplingServerError
            raise kind(f"no answer from sampling.url {self.url}: {error}") from error

    def _check(self, reply: Reply, purpose: str) -> Reply:
        if reply.status == 200:
            return reply
        text = f"{self.url} did not {purpose}: HTTP {reply.status} {reply.body.decode(errors='replace')[:500]}"
        if reply.status == BAD_REQUEST:
            raise ValueError(text)
        raise Unavailable(text) if reply.status in RETRIED_STATUS else SamplingServerError(text)


def build_body(request: GenerationRequest) -> dict[str, Any]:
    """Body of `/inference/v1/generate`; it leaves nothing to the server's default sampling parameters."""
    params = request.params
    fields = {
        "max_tokens": max(params.max_tokens, 1),  # vLLM has no 0
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "min_tokens": params.min_tokens,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": (params.seed + 2**63) % 2**64 - 2**63,  # vLLM's are signed
        "stop": list(params.stop),
        "include_stop_str_in_output": params.include_stop,
        "skip_special_tokens": params.skip_special_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "logprobs": params.top_logprobs,
    }
    if params.prompt_logprobs is not None:
        fields["prompt_logprobs"] = params.prompt_logprobs
    body = {"token_ids": request.prompt, "sampling_params": fields}
    return body if request.adapter is None else {**body, "model": request.adapter}


def parse_output(request: GenerationRequest, reply: dict[str, Any]) -> Output:
    """The completion of a response; `SamplingServerError` for another number of log-probs than of tokens."""
    [choice] = reply["choices"]
    content, tokens = (choice["logprobs"] or {}).get("content") or [], choice["token_ids"]
    if len(content) != len(tokens):
        raise SamplingServerError(f"the server returned {len(content)} log-probs for {len(tokens)} tokens")
    limit, num_top = request.params.max_tokens, request.params.top_logprobs
    content, tokens = content[:limit], tokens[:limit]
    tops = [[(_token(top), top["logprob"]) for top in entry["top_logprobs"][:num_top]] for entry in content]
    return Output(
        request=request,
        token_ids=tokens,
        logprobs=[entry["logprob"] for entry in content],
        top_logprobs=tops if num_top else [],
        versions=[(0, 0)],
        finish_reason=choice["finish_reason"] if limit else "length",
        stop_reason=choice.get("stop_reason"),
        prompt_logprobs=_parse_prompt(request.prompt, request.params, reply.get("prompt_logprobs")),
    )


def _token(entry: dict[str, Any]) -> int:
    return int(entry["token_id"])


def _parse_prompt(
    prompt: Sequence[int], params: SamplingParams, rows: Sequence[dict[str, Any] | None] | None
) -> PromptLogprobs | None:
    """Log-probs of the prompt from `prompt_start` on; each row has the token itself and the most likely ones."""
    if params.prompt_logprobs is None:
        return None
    if rows is None:
        raise SamplingServerError("the server returned no prompt_logprobs")
    logprobs: list[float] = []
    tops: list[TopLogprobs] = []
    for token, row in list(zip(prompt, rows, strict=True))[params.prompt_start :]:
        assert row is not None, "only the first token has no log-prob"
        ranked = sorted((entry["rank"], int(i), entry["logprob"]) for i, entry in row.items() if entry["rank"])
        logprobs.append(row[str(token)]["logprob"])
        tops.append([(i, value) for rank, i, value in ranked if rank <= params.prompt_logprobs])
    return PromptLogprobs(logprobs, tops, [])
