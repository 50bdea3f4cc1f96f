"""Samples of the training API from an inference server: vLLM or the embedded engine, in another process or machine.

The server needs the same base model, LoRA, read access to the checkpoints below `output_dir`, and vLLM's route
`/inference/v1/generate`:

    inference --backend vllm --model.name smollm2 --max-lora-rank 32 --weight-dirs '["outputs/serve"]'
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from prime_rl.client.http import HttpPool, Reply
from prime_rl.inference.engine import GenerationRequest, Output, PromptLogprobs, SamplingParams, TopLogprobs
from prime_rl.training_api.checkpoints import AdapterCheckpoint

MAX_CONNECTIONS = 256
BAD_REQUEST, NOT_FOUND = 400, 404


class SamplingServerError(RuntimeError):
    """The inference server cannot be reached, or rejects a request."""


class ServerSampling:
    """Samples over HTTP; `find_directory` gives the PEFT directory of a checkpoint as the server sees it."""

    def __init__(
        self, url: str, find_directory: Callable[[AdapterCheckpoint], Path], api_key: str | None, timeout_s: float
    ) -> None:
        self.url, self._find_directory = url, find_directory
        self._pool = HttpPool(url, max_connections=MAX_CONNECTIONS, timeout_s=timeout_s)
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._loaded: dict[str, AdapterCheckpoint] = {}

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Output]:
        """See `SamplingBackend`; adapters that a restarted server has lost are loaded again."""
        return list(await asyncio.gather(*map(self._generate, requests)))

    async def _generate(self, request: GenerationRequest) -> Output:
        body = build_body(request)
        reply = await self._post("/inference/v1/generate", body)
        if reply.status == NOT_FOUND and request.adapter in self._loaded:
            await self.load_adapter(self._loaded[request.adapter])
            reply = await self._post("/inference/v1/generate", body)
        return parse_output(request, orjson.loads(self._check(reply, "sample").body))

    async def load_adapter(self, checkpoint: AdapterCheckpoint) -> None:
        """See `SamplingBackend`."""
        body = {"lora_name": checkpoint.path, "lora_path": str(self._find_directory(checkpoint).resolve())}
        self._check(await self._post("/v1/load_lora_adapter", body), "load an adapter")
        self._loaded[checkpoint.path] = checkpoint

    async def remove_adapter(self, path: str) -> None:
        """See `SamplingBackend`; a server that was restarted no longer has it."""
        self._loaded.pop(path, None)
        await self._post("/v1/unload_lora_adapter", {"lora_name": path})

    async def _post(self, path: str, body: dict[str, Any]) -> Reply:
        try:
            return await self._pool.request("POST", path, orjson.dumps(body), self._headers)
        except (ConnectionError, TimeoutError) as error:
            raise SamplingServerError(f"no answer from sampling.url {self.url}: {error}") from error

    def _check(self, reply: Reply, purpose: str) -> Reply:
        if reply.status == 200:
            return reply
        text = f"{self.url} did not {purpose}: HTTP {reply.status} {reply.body.decode(errors='replace')[:500]}"
        raise ValueError(text) if reply.status == BAD_REQUEST else SamplingServerError(text)


def build_body(request: GenerationRequest) -> dict[str, Any]:
    """Body of `/inference/v1/generate`."""
    params = request.params
    fields = {
        "max_tokens": max(params.max_tokens, 1),  # vLLM has no 0
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
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
