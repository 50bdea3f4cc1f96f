"""Byte-level tokenizers of 256 letters with the special tokens and chat templates that published models have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from prime_rl.runtime.tokenizer import load_tokenizer

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' -}}{% endif -%}
"""

SMOLLM2 = """\
{%- for message in messages -%}
{%- if loop.first and messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful AI assistant.<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' -}}{% endif -%}
"""

TWO_ROLES = """\
{%- for message in messages if message.role in ('system', 'user') -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
"""

LLAMA3 = """\
{{- '<|begin_of_text|>' -}}
{%- if messages[0].role == 'system' -%}
{%- set system, rest = messages[0].content, messages[1:] -%}
{%- else -%}
{%- set system, rest = '', messages -%}
{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + (style or '') + system -}}
{%- if tools %}{{- '\\n' + (tools | tojson) -}}{% endif -%}
{{- '<|eot_id|>' -}}
{%- for message in rest -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
{%- if message.name %}{{- message.name + ': ' -}}{% endif -%}
{%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' -}}{% endif -%}
{{- message.content | trim -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{% endif -%}
"""

LLAMA3_SPECIAL = [f"<|{name}|>" for name in "begin_of_text end_of_text start_header_id end_header_id eot_id".split()]
SMOLLM2_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>"]
UNMARKED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "   "]


def build_tokenizer(
    directory: Path, template: str, special: list[str], unmarked: list[str], named: dict[str, str]
) -> Any:
    """A tokenizer loaded from files: `special` are so in tokenizer.json, `named` in tokenizer_config.json."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in special])
    inner.add_tokens([AddedToken(content, special=False, normalized=False) for content in unmarked])
    directory.mkdir(parents=True, exist_ok=True)
    inner.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(template)
    (directory / "config.json").write_text("{}")
    return load_tokenizer(str(directory))


def build_llama3(directory: Path) -> Any:
    """Role tokens that only tokenizer.json marks special; a template with tools."""
    named = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    return build_tokenizer(directory, LLAMA3, LLAMA3_SPECIAL, UNMARKED, named)


def build_smollm2(directory: Path) -> Any:
    """A template with a default system message and without tools."""
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    return build_tokenizer(directory, SMOLLM2, SMOLLM2_SPECIAL, [], named)


def build_unmarked_chatml(directory: Path) -> Any:
    """Role tokens that no file marks special, as in some fine-tuned models."""
    unmarked = ["<|im_start|>", "<|im_end|>", *UNMARKED]
    return build_tokenizer(directory, CHATML, ["</s>"], unmarked, {"eos_token": "</s>"})
