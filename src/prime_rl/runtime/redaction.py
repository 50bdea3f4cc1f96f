"""Removal of secrets from terminals, log files, records and reports.

A secret is the value of an environment variable with a matching name (`SECRET_NAME`), of a variable that a config names
(`api_key_var`), or of a config key such as `headers.authorization`. Token ids and other numbers are never changed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "***"
SECRET_NAME = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASS|CREDENTIALS)$")
SECRET_KEY = re.compile(
    r"authorization|password|secret|api[_-]?key|(?:access|auth|api|bearer|hf)[_-]?token", re.IGNORECASE
)
"""Config keys with secret values; keys that end in `_var` contain the name of a variable."""
MIN_LENGTH = 8
MIN_DISTINCT = 4
NUMBERS = {int, float, bool}
NUM_CHECKED = 16
"""A list that starts with this many numbers is numeric (token ids, log-probs) and not searched."""
PLACEHOLDERS = {"changeme", "disabled", "not-needed", "password", "undefined"}


class Redactor:
    """Replaces secrets, also encoded ones (`encode_forms`), by `***`."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        forms = {form for secret in secrets for form in encode_forms(secret)}
        self._forms = tuple(sorted(forms, key=len, reverse=True))  # the longest first: it may contain another
        self._pattern = re.compile("|".join(map(re.escape, self._forms)))
        self._byte_forms = [form.encode(errors="surrogateescape") for form in self._forms]
        self._byte_pattern = re.compile(b"|".join(map(re.escape, self._byte_forms)))
        self._by_first_byte: dict[int, list[bytes]] = {}
        for form in self._byte_forms:
            self._by_first_byte.setdefault(form[0], []).append(form)
        self._max_bytes = max(map(len, self._byte_forms), default=0)
        self._inner_bytes = frozenset(byte for form in self._byte_forms for byte in form[:-1])

    def __bool__(self) -> bool:
        return bool(self._forms)

    def redact(self, text: str) -> str:
        """`text` without secrets; the same object if there are none."""
        for form in self._forms:  # a substring search is much faster than the alternation
            if form in text:
                return self._pattern.sub(MASK, text)
        return text

    def redact_bytes(self, data: bytes) -> bytes:
        """`data` without secrets."""
        return self._byte_pattern.sub(MASK.encode(), data) if self._forms else data

    def split(self, data: bytes) -> tuple[bytes, bytes]:
        """The redacted part of a stream, and its end that may be the start of a secret."""
        if not self._forms:
            return data, b""
        cut, at, parts = self._find_open_end(data, 0), 0, list[bytes]()
        if not any(form in data for form in self._byte_forms):
            return data[:cut], data[cut:]
        for match in self._byte_pattern.finditer(data):
            if match.start() >= cut:
                break
            parts += [data[at : match.start()], MASK.encode()]
            at = match.end()
            if at > cut:
                cut = self._find_open_end(data, at)
        return b"".join([*parts, data[at:cut]]), data[cut:]

    def _find_open_end(self, data: bytes, start: int) -> int:
        """Start of the first suffix that is a prefix of a secret; the end of `data` if there is none."""
        size = len(data)
        if size and data[-1] in self._inner_bytes:
            for position in range(max(start, size - self._max_bytes + 1), size):
                suffix = data[position:]
                for form in self._by_first_byte.get(data[position], ()):
                    if len(form) > len(suffix) and form.startswith(suffix):
                        return position
        return size


def encode_forms(secret: str) -> set[str]:
    """Encodings of a secret: plain, JSON, repr, URL, HTML, hexadecimal, base64 (also inside longer text)."""
    import base64
    import html
    import json
    from urllib.parse import quote, quote_plus

    data = secret.encode(errors="surrogateescape")
    urls = {quote(data), quote(data, safe=""), quote_plus(data)}
    urls |= {re.sub(r"%[0-9A-F]{2}", lambda found: found[0].lower(), url) for url in urls}
    escaped = {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1]}
    encoded = {html.escape(secret), data.hex(), data.hex().upper()}
    for shift in range(3):  # base64 of `user:secret` depends on where in a group of three bytes the secret starts
        bits = 8 * (shift + len(data))
        whole = slice((8 * shift + 5) // 6, bits // 6)  # characters that the secret alone determines
        padded = bytes(shift) + data
        encoded |= {base64.b64encode(padded).decode()[whole], base64.urlsafe_b64encode(padded).decode()[whole]}
    return {secret} | urls | escaped | encoded


def is_secret_value(value: str) -> bool:
    """False for values that are too short or too common: removing them would make output unreadable."""
    return (
        len(value) >= MIN_LENGTH
        and len(set(value)) >= MIN_DISTINCT
        and value.lower() not in PLACEHOLDERS
        and not os.path.exists(value)  # GOOGLE_APPLICATION_CREDENTIALS and others name a file
    )


_variables: set[str] = set()
_values: set[str] = set()
_current: Redactor | None = None


def find_secret_variables() -> dict[str, str]:
    """Environment variables with secrets, by their names or because a config names them."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name in _variables or SECRET_NAME.search(name.upper())) and is_secret_value(value.strip())
    }


def load_redactor() -> Redactor:
    """The redactor of this process, compiled at the first use."""
    global _current
    if (current := _current) is None:
        values = _values | set(find_secret_variables().values())
        # A multi-line key (PEM) may also be printed line by line.
        lines = {line for value in values for line in value.splitlines() if not line.startswith("-----")}
        current = _current = Redactor(filter(is_secret_value, {value.strip() for value in values | lines}))
    return current


def refresh_secrets() -> None:
    """Read the environment again at the next use."""
    global _current
    _current = None


def register_config(values: Mapping[str, Any]) -> None:
    """Register the secrets of a config: variables named by `api_key_var` and values of keys like `authorization`."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            register_config(value)
        elif isinstance(value, list | tuple):
            register_config({str(i): item for i, item in enumerate(value) if isinstance(item, Mapping)})
        elif isinstance(value, str) and key.endswith("api_key_var"):
            _variables.add(value)
        elif isinstance(value, str) and SECRET_KEY.search(key) and not key.endswith("_var"):
            _values.update({value, value.removeprefix("Bearer ")})
    refresh_secrets()


def redact(text: str) -> str:
    """`text` without secrets."""
    return load_redactor().redact(text)


def redact_fields(value: Any) -> Any:
    """A copy of JSON-like data with redacted strings; numbers, such as token ids, are unchanged."""
    redactor = load_redactor()
    return _redact_fields(value, redactor) if redactor else value


def _redact_fields(value: Any, redactor: Redactor) -> Any:
    if isinstance(value, str):
        return redactor.redact(value)
    if isinstance(value, Mapping):
        return {_redact_fields(key, redactor): _redact_fields(item, redactor) for key, item in value.items()}
    if isinstance(value, list | tuple) and not NUMBERS.issuperset(map(type, value[:NUM_CHECKED])):
        return [_redact_fields(item, redactor) for item in value]
    return value
