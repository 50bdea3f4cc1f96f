"""Writes the shipped character-level model directory `src/prime_rl/assets/tiny-qwen3` (no weights, no network)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TARGET = Path(__file__).resolve().parents[1] / "src/prime_rl/assets/tiny-qwen3"
ROLES = ("system", "user", "assistant", "tool")
# A whole header is one special token: prompts stay short, and ordinary text that contains a role word is untouched.
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|im_start|>{role}\n" for role in ROLES))
# The markup of the tiny recipes, words of the text: they survive decoding.
TAGGED = "reversed_text answer think guess tool_call alphabetical_sorted combined_alphabetical_sorted".split()
MARKUP = (*(f"<{end}{tag}>" for tag in TAGGED for end in ("", "/")), " // new name!")

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content -%}
        {%- for part in content -%}{{- part if part is string else (part.text or '') -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set first = 0 -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages and messages[0].role == 'system' -%}
        {%- set first = 1 -%}
        {{- text(messages[0].content) + '\\n\\n' -}}
    {%- endif -%}
    {{- 'Tools you may call:\\n' -}}
    {%- for tool in tools -%}
        {%- set tool = tool.function or tool -%}
        {{- tool.name + '(' + (tool.parameters.properties or {}) | join(', ') + ')\\n' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages[first:] -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' and message.reasoning_content -%}
        {{- '<think>' + message.reasoning_content + '</think>' -}}
    {%- endif -%}
    {{- text(message.content) -}}
    {%- for call in (message.tool_calls or []) -%}
        {%- set call = call.function or call -%}
        {%- set arguments = call.arguments if call.arguments is string else (call.arguments or {}) | tojson -%}
        {{- '<tool_call>{"name": ' + (call.name | tojson) + ', "arguments": ' + arguments + '}</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def build_tokenizer() -> Tokenizer:
    """256 byte tokens without merges, then the special tokens, then the markup."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=byte_of)
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return tokenizer


def byte_of(char: str) -> int:
    """The byte that a character of the byte-level alphabet stands for (printable Latin-1 is itself)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [byte for byte in range(256) if byte not in printable]
    return ord(char) if ord(char) < 256 else shifted[ord(char) - 256]


def build_config(num_tokens: int, eos: int, pad: int) -> dict[str, Any]:
    """A Qwen3 shape; the vocabulary is padded to a multiple of 64, as the widths are, for whole vector lanes."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": -(-num_tokens // 64) * 64,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "use_cache": True,
    }


def main() -> None:
    """Write every file of the directory."""
    TARGET.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save(str(TARGET / "tokenizer.json"))
    eos, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    config = build_config(tokenizer.get_vocab_size(), eos, pad)
    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": [eos, pad], "pad_token_id": pad, "temperature": 1.0},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "extra_special_tokens": list(SPECIAL[1:2] + SPECIAL[3:]),
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        },
    }
    for name, content in files.items():
        (TARGET / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (TARGET / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


if __name__ == "__main__":
    main()
