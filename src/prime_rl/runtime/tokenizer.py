"""Model directories and tokenizers by name."""

from __future__ import annotations

import difflib
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl.pretrained.cache import models_cache_dir, resolve_gguf
from prime_rl.pretrained.fetch import HUB_FILES, KNOWN_MODELS, fetch_model
from prime_rl.runtime.run_dir import RunDir
from rollouts.training.datasets.rows import describe_hub_error
from rollouts.training.json_files import read_json_file
from rollouts.training.model_config import GENERATION_FILE, read_eos_ids
from rollouts.training.steps import latest_step, step_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TORCH_WEIGHTS = "pytorch_model*.bin"
"""Weights in torch's format, which are read, and downloaded, only if there are no safetensors."""
HUB_CODE_FILES = ("*.py", "*.tiktoken")
"""Code of a tokenizer, and a format that only such code reads."""
SECOND_WEIGHTS = ["consolidated*.safetensors", "*/*.safetensors"]
"""The same weights in the form of the publisher's own programs, such as those of Mistral and gpt-oss."""

READ_BESIDE_WEIGHTS = ("*config.json", "tokenizer*", "chat_template*")
"""Other files of a model that its completions depend on."""

WRITTEN_BY_A_RUN = re.compile(r"(^|/)weights/step_\d+/?$")
ASSETS_DIR = Path(__file__).resolve().parents[1] / "assets"
MAX_DIFFERENT_TOKENS = 0.01
"""Share of ids of the same vocabulary that may have different texts."""


def resolve_model_dir(name: str, trust_remote_code: bool = False) -> Path:
    """The directory of a model: a path, a shipped name (`tiny-qwen3`), a known name (`smollm2`) or a hub id.

    A GGUF file is converted once, known models and hub ids are downloaded once, their code only with
    `trust_remote_code`; raises `ValueError` for other names.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model.name {name!r} is a directory without a config.json: {_suggest_model(path)}")
        return path.resolve()
    if path.is_file():
        return resolve_gguf(path)
    if (ASSETS_DIR / name / "config.json").is_file():
        return ASSETS_DIR / name
    if name in KNOWN_MODELS:
        return fetch_model(name)
    if WRITTEN_BY_A_RUN.search(name):
        raise ValueError(f"model.name {name!r} does not exist: an earlier run writes it, so start that one first")
    known = [*sorted(file.parent.name for file in ASSETS_DIR.glob("*/config.json")), *KNOWN_MODELS]
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        near = difflib.get_close_matches(name.lower(), known, n=1)
        raise ValueError(
            f"model.name {name!r} is no directory or GGUF file, no known model ({', '.join(known)}) and no hub id "
            f"(owner/name): {f'did you mean {near[0]}?' if near else 'check it'}"
        )
    from huggingface_hub import snapshot_download

    try:
        patterns = [*HUB_FILES, *(HUB_CODE_FILES if trust_remote_code else ())]
        directory = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=SECOND_WEIGHTS))
        if not any(directory.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=[TORCH_WEIGHTS])
    except Exception as error:
        raise ValueError(f"model.name {name!r} is no directory and {describe_hub_error(error)}") from error
    if not (directory / "config.json").is_file():
        raise ValueError(f"model.name {name!r} has no config.json on the hub: {_suggest_model(directory)}")
    return directory


def _suggest_model(path: Path) -> str:
    """What to give instead of a directory that is not a model."""
    for root in (path, RunDir(path).weights):
        if (step := latest_step(root)) is not None:
            return f"its newest step is --model.name {step_path(root, step)}"
    if (path / "adapter_config.json").is_file():
        return "it is a LoRA adapter, give the model that it was trained on"
    inside = sorted(file.parent for file in path.glob("*/config.json"))
    return f"did you mean {inside[0]}?" if inside else "give a Hugging Face model, or the path of a GGUF file"


def check_weights(directory: Path, random_init: bool) -> None:
    """`ValueError` for a model directory without weight files, unless the weights are initialized at random."""
    if not random_init and not find_weight_files(directory):
        raise ValueError(f"{directory} has no weights: set model.debug.random_init = true to start from random ones")


def check_window(text: str, model: str, max_model_len: int | None, what: str, key: str) -> None:
    """`ValueError` for a text that fills the window of a model; `what` names the text, `key` that of max_model_len."""
    if not text:
        return
    window = min(filter(None, (max_model_len, _read_window(resolve_model_dir(model)))), default=0)
    num_tokens = len(load_tokenizer(model).encode(text, add_special_tokens=False))
    if 0 < window <= num_tokens:
        raise ValueError(
            f"{what} has {num_tokens} tokens and the model's window is {window}: shorten the context, or raise {key} "
            f"up to the model's own window"
        )


def find_window(name: str) -> int | None:
    """The window of a model, if it is on this machine (`find_local_model`) and its config names one."""
    directory = find_local_model(name)
    return None if directory is None else _read_window(directory)


def _read_window(directory: Path) -> int | None:
    config = read_json_file(directory / "config.json")
    window: int | None = config.get("max_position_embeddings") or config.get("n_positions")
    return window


def has_chat_template(directory: Path) -> bool:
    """Whether the files of a model contain a chat template; most base models have none."""
    if any((directory / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    path = directory / "tokenizer_config.json"
    return path.is_file() and bool(read_json_file(path).get("chat_template"))


def find_local_model(name: str) -> Path | None:
    """The directory of a model, if it is on this machine without conversion or download."""
    found = (Path(name).expanduser(), ASSETS_DIR / name, models_cache_dir() / name)
    if local := next((path for path in found if (path / "config.json").is_file()), None):
        return local
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # not a hub id
        if isinstance(config := try_to_load_from_cache(name, "config.json"), str):
            return Path(config).parent
    return None


def has_same_vocabulary(first: Path, second: Path) -> bool:
    """Whether two models give the same ids to the same tokens; True as well if one has no `tokenizer.json`.

    Each may have tokens that the other lacks. Some ids may differ, as names of reserved tokens do.
    """
    from tokenizers import Tokenizer

    files = [directory / "tokenizer.json" for directory in (first, second)]
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return True
    one, other = ({i: text for text, i in Tokenizer.from_file(str(file)).get_vocab().items()} for file in files)
    shared = one.keys() & other.keys()
    return sum(one[i] != other[i] for i in shared) <= MAX_DIFFERENT_TOKENS * len(shared)


def find_weight_files(directory: Path) -> list[Path]:
    """The weight files of a model directory: safetensors, or if there are none, those in torch's format."""
    return sorted(directory.glob("*.safetensors")) or sorted(directory.glob(TORCH_WEIGHTS))


def fingerprint_model(name: str) -> list[str]:
    """Name, size and modification time of each file of a local model that is read; empty for any other name."""
    path = Path(name).expanduser()
    others = {file for pattern in READ_BESIDE_WEIGHTS for file in path.glob(pattern)}
    files = [path] if path.is_file() else [*find_weight_files(path), *sorted(others)]
    return [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]


def load_tokenizer(
    name: str, chat_template: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; `chat_template` (text, or the path of a file) replaces its template."""
    template = None if chat_template is None else read_chat_template(chat_template)
    directory = resolve_model_dir(name, trust_remote_code)
    tokenizer: PreTrainedTokenizerBase
    if (directory / "tokenizer.json").is_file() and not trust_remote_code:
        from transformers import PreTrainedTokenizerFast

        # transformers suspects an old Mistral tokenizer in every directory whose config.json has no version.
        is_mistral = "stral" in str(read_json_file(directory / "config.json").get("model_type"))
        options = {} if is_mistral else {"fix_mistral_regex": False}
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(directory), **options)
        if tokenizer.eos_token is None:  # that of GPT-2 is in the code of its own class
            tokenizer.eos_token = _find_end_token(tokenizer, directory)
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=trust_remote_code)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _find_end_token(tokenizer: PreTrainedTokenizerBase, directory: Path) -> str | None:
    """The first end token that the model's configuration names."""
    ids = read_eos_ids(directory / GENERATION_FILE) or read_eos_ids(directory / "config.json")
    token = tokenizer.convert_ids_to_tokens(ids[0]) if ids else None
    return token if isinstance(token, str) else None


def read_chat_template(text_or_path: str) -> str:
    """The text of a chat template; text without `{` is the path of a file, `ValueError` if there is none."""
    if "{" in text_or_path:
        return text_or_path
    path = Path(text_or_path).expanduser()
    if not path.is_file():
        raise ValueError(
            f"tokenizer.chat_template = {text_or_path!r} is neither a file nor a template: give the path of a file, or "
            "text with {{ }}"
        )
    return path.read_text(encoding="utf-8-sig")
