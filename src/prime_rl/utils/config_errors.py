"""Configuration errors in the user's words: key, value, where it was given, and the cure, in at most three lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import ErrorDetails

from prime_rl.utils.config_keys import KeyPath, Shape, child, field_shape, fields_of, suggest, suggest_key, variant

COMMAND_LINE = "CLI"
EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text (in quotes in a TOML file)",
    "list": "a list",
    "tuple": "a list",
    "dict": "a table",
    "model": "a section",
    "path": "a path",
}
BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
    "multiple_of": ("multiple_of", "a multiple of"),
}
EXAMPLES = {"int": "10", "float": "0.1", "bool": "true", "str": '"text"', "path": '"some/dir"'}


class ConfigError(ValueError):
    """A wrong configuration; the message is complete and needs no traceback."""


def fail(what: str, cure: str | None = None) -> ConfigError:
    """An error of one line for what is wrong and one for what to do."""
    return ConfigError(f"{what}\n  {cure}" if cure else what)


def shorten(value: Any, limit: int = 60) -> str:
    """A value as it is shown in a message."""
    text = str(value).lower() if isinstance(value, bool) else repr(str(value) if isinstance(value, str) else value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def name_key(path: KeyPath, source: str) -> str:
    """A key the way the user wrote it: as an option, or as a key of a file or variable."""
    key = ".".join(path)
    return f"--{key}" if source == COMMAND_LINE else f"{key} ({source})"


def unknown_key(path: KeyPath, source: str, root: Shape, prog: str) -> ConfigError:
    """The error for a key that no section has."""
    dashes = "--" if source == COMMAND_LINE else ""
    if near := suggest_key(".".join(path), root):
        cure = f"did you mean {dashes}{near}?"
    elif len(path) > 1 and (beside := _keys_beside(path, root)):
        cure = f"{'.'.join(path[:-1])} has {beside}"
    else:
        cure = f"`{prog} --help` lists every key"
    return fail(f"unknown {'option' if dashes else 'key'} {name_key(path, source)}", cure)


def _keys_beside(path: KeyPath, root: Shape) -> str | None:
    """The keys of the section that a wrong key was looked for in."""
    shape: Shape | None = root
    for part in path[:-1]:
        shape = child(shape, part.replace("-", "_")) if shape else None
    return ", ".join(fields_of(shape)) if shape and shape.kind == "section" else None


def wrong_variant(path: KeyPath, source: str, section: Shape, chosen: Any) -> ConfigError:
    """The error for a key that only another type of the section has."""
    tag = f"{'.'.join(path[:-1])}.{section.tag}"
    homes = [member for member in section.sections if path[-1] in member.model_fields]
    types = [str(choice) for member in homes for choice in field_shape(member.model_fields[section.tag or ""]).choices]
    return fail(
        f"{name_key(path, source)} does not belong to {tag} = {chosen}", f"it needs {tag} = {' or '.join(types)}"
    )


def explain(error: ErrorDetails | Mapping[str, Any], shape: Shape | None) -> tuple[str, str | None]:
    """What a value had to be, and the cure, from one pydantic error."""
    kind, context = str(error["type"]), error.get("ctx") or {}
    if kind in BOUNDS:
        name, words = BOUNDS[kind]
        return f"must be {words} {context[name]:g}", None
    if kind in ("literal_error", "enum", "union_tag_invalid") and shape and shape.choices:
        near = suggest(str(error["input"]), map(str, shape.choices))
        return f"must be one of {', '.join(map(str, shape.choices))}", f"did you mean {near}?" if near else None
    if kind in ("value_error", "assertion_error"):
        return str(context.get("error", error["msg"])), None
    if kind == "too_short":
        return f"needs at least {context['min_length']} {'entry' if context['min_length'] == 1 else 'entries'}", None
    expected = EXPECTED.get(kind.split("_")[0])
    if not expected:
        return str(error["msg"])[:1].lower() + str(error["msg"])[1:], None
    return f"must be {expected}", None


def wrong_value(path: KeyPath, value: Any, source: str, problem: str, cure: str | None, shape: Shape) -> ConfigError:
    """The error for a value that does not fit its key."""
    key = ".".join(path[:-1] if path[-1].isdigit() and len(path) > 1 else path)
    if cure is None and problem.removeprefix("must be ") in EXPECTED.values():
        allowed_none = ' (or "None" for unset)' if shape.optional and shape.kind != "any" else ""
        sample = EXAMPLES.get(shape.describe().split("|")[0])
        write = f"--{key} {sample}" if source == COMMAND_LINE else f"{key} = {sample}"
        cure = f"write for example `{write}`{allowed_none}" if sample else None
    shown = f"--{key} {shorten(value)}" if source == COMMAND_LINE else f"{key} = {shorten(value)} ({source})"
    return fail(f"{shown}: {problem}", cure)


def key_of(location: tuple[int | str, ...], root: Shape) -> tuple[KeyPath, Shape]:
    """The key that pydantic's location means: without the tags it inserts for unions."""
    path: KeyPath = ()
    shape = root
    for part in location:
        below = child(shape, str(part))
        if below is None:
            if shape.kind == "section" and variant(shape, part):
                continue
            return (*path, str(part)) if shape.kind == "section" else path, shape
        path, shape = (*path, str(part)), below
    return path, shape


def translate(errors: list[ErrorDetails], root: Shape, sources: Mapping[str, str], prog: str) -> ConfigError:
    """The first of pydantic's errors as one of ours, with a count of the others."""
    error = errors[0]
    path, shape = key_of(error["loc"], root)
    source = find_source(path, sources)
    key = ".".join(path)
    if error["type"] == "missing":
        found = fail(f"{key} is required and was not given", f"write --{key} VALUE, or {key} = VALUE in a file")
    elif error["type"] == "extra_forbidden":
        section, chosen = key_of(error["loc"][:-1], root)[1], error["loc"][-2] if len(error["loc"]) > 1 else None
        other = section.tag and path[-1] in fields_of(section)
        found = wrong_variant(path, source, section, chosen) if other else unknown_key(path, source, root, prog)
    elif error["type"] in ("value_error", "assertion_error") and shape.kind == "section":
        problem = explain(error, shape)[0]
        found = ConfigError(f"{key}: {problem}" if key else problem)
    else:
        problem, cure = explain(error, shape)
        found = wrong_value(path, error["input"], source, problem, cure, shape)
    others = len({key_of(other["loc"], root)[0] for other in errors} - {path})
    return ConfigError(f"{found}\n  ({others} more to fix after this one)") if others else found


def find_source(path: KeyPath, sources: Mapping[str, str]) -> str:
    """Where a key's value came from: the source noted for it or for the nearest key above it."""
    for end in range(len(path), 0, -1):
        if source := sources.get(".".join(path[:end])):
            return source
    return "default"
