"""Errors for users: of configurations (key, value, source and fix, in at most three lines), and of groups of tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import ErrorDetails

from prime_rl.configuration.foreign_names import PRIME_RL_VALUES, advise, translate_name
from prime_rl.configuration.schema import (
    FieldSchema,
    KeyPath,
    child,
    field_schema,
    fields_of,
    suggest,
    suggest_key,
    variant,
)

COMMAND_LINE = "CLI"
MAX_PROBLEMS = 12
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
    """An invalid configuration: one complete message per problem, which needs no traceback."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def find_cause(error: BaseException) -> BaseException:
    """The first error of an exception group, which a group of tasks raises; other errors unchanged."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error


def join_errors(errors: Iterable[ConfigError]) -> ConfigError:
    """One error with the problems of all, each once; the first `MAX_PROBLEMS` of them."""
    problems = list(dict.fromkeys(problem for error in errors for problem in error.problems))
    hidden = len(problems) - MAX_PROBLEMS
    return ConfigError(*problems[:MAX_PROBLEMS], *([f"{hidden} more problems are not shown"] if hidden > 0 else []))


def fail(what: str, hint: str | None = None) -> ConfigError:
    """An error with one line for the problem and one for the fix."""
    return ConfigError(f"{what}\n  {hint}" if hint else what)


def shorten(value: Any, limit: int = 60) -> str:
    """A value formatted for a message."""
    text = str(value).lower() if isinstance(value, bool) else repr(str(value) if isinstance(value, str) else value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def name_key(path: KeyPath, source: str) -> str:
    """A key as the user wrote it: as an option, or as a key of a file or variable."""
    key = ".".join(path)
    return f"--{key}" if source == COMMAND_LINE else f"{key} ({source})"


def unknown_key(path: KeyPath, source: str, root: FieldSchema, prog: str) -> ConfigError:
    """The error for an unknown key."""
    dashes = "--" if source == COMMAND_LINE else ""
    if other := translate_name(path, root):
        hint = f"did you mean {dashes}{other[0]}? ({other[1]})"
    elif advice := advise(path, root):
        hint = advice
    elif near := suggest_key(".".join(path), root):
        hint = f"did you mean {dashes}{near}?"
    elif len(path) > 1 and (siblings := _sibling_keys(path, root)):
        hint = f"{'.'.join(path[:-1])} has {siblings}"
    else:
        hint = f"`{prog} --help all` lists every key"
    return fail(f"unknown {'option' if dashes else 'key'} {name_key(path, source)}", hint)


def _sibling_keys(path: KeyPath, root: FieldSchema) -> str | None:
    """The keys of the section that contains an unknown key."""
    schema: FieldSchema | None = root
    for part in path[:-1]:
        schema = child(schema, part.replace("-", "_")) if schema else None
    return ", ".join(fields_of(schema)) if schema and schema.kind == "section" else None


def wrong_variant(path: KeyPath, source: str, section: FieldSchema, chosen: Any) -> ConfigError:
    """The error for a key of another variant of the section."""
    tag = f"{'.'.join(path[:-1])}.{section.tag}"
    members = [member for member in section.sections if path[-1] in member.model_fields]
    types = [str(choice) for cls in members for choice in field_schema(cls.model_fields[section.tag or ""]).choices]
    return fail(
        f"{name_key(path, source)} does not belong to {tag} = {chosen}", f"it needs {tag} = {' or '.join(types)}"
    )


def explain(error: ErrorDetails | Mapping[str, Any], schema: FieldSchema | None) -> tuple[str, str | None]:
    """The expected value and the fix, from one pydantic error."""
    kind, context = str(error["type"]), error.get("ctx") or {}
    if kind in BOUNDS:
        name, words = BOUNDS[kind]
        return f"must be {words} {context[name]:g}", None
    if kind in ("literal_error", "enum", "union_tag_invalid") and schema and schema.choices:
        choices = [str(choice) for choice in schema.choices]
        other = PRIME_RL_VALUES.get(str(error["input"]))
        near = other if other in choices else suggest(str(error["input"]), choices)
        return f"must be one of {', '.join(choices)}", f"did you mean {near}?" if near else None
    if kind in ("value_error", "assertion_error"):
        return str(context.get("error", error["msg"])), None
    if kind == "too_short":
        return f"needs at least {context['min_length']} {'entry' if context['min_length'] == 1 else 'entries'}", None
    expected = EXPECTED.get(kind.split("_")[0])
    if not expected:
        return str(error["msg"])[:1].lower() + str(error["msg"])[1:], None
    return f"must be {expected}", None


def wrong_value(
    path: KeyPath, value: Any, source: str, problem: str, hint: str | None, schema: FieldSchema
) -> ConfigError:
    """The error for an invalid value."""
    key = ".".join(path[:-1] if path[-1].isdigit() and len(path) > 1 else path)
    if schema.kind == "list" and isinstance(value, dict):
        hint = f"write [[{key}]] instead of [{key}]: each such section is one entry"
    if hint is None and problem.removeprefix("must be ") in EXPECTED.values():
        allowed_none = ' (or "None" for unset)' if schema.optional and schema.kind != "any" else ""
        sample = EXAMPLES.get(schema.describe().split("|")[0])
        write = f"--{key} {sample}" if source == COMMAND_LINE else f"{key} = {sample}"
        hint = f"write for example `{write}`{allowed_none}" if sample else None
    shown = f"--{key} {shorten(value)}" if source == COMMAND_LINE else f"{key} = {shorten(value)} ({source})"
    return fail(f"{shown}: {problem}", hint)


def key_of(location: tuple[int | str, ...], root: FieldSchema) -> tuple[KeyPath, FieldSchema]:
    """The key at a pydantic error location, without the tags that pydantic inserts for unions."""
    path: KeyPath = ()
    schema = root
    for part in location:
        below = child(schema, str(part))
        if below is None:
            if schema.kind == "section" and variant(schema, part):
                continue
            return (*path, str(part)) if schema.kind == "section" else path, schema
        path, schema = (*path, str(part)), below
    return path, schema


def translate(errors: list[ErrorDetails], root: FieldSchema, sources: Mapping[str, str], prog: str) -> ConfigError:
    """Convert pydantic errors to a `ConfigError`, one problem per key."""
    found: dict[KeyPath, ConfigError] = {}
    for error in errors:
        if error["type"] != "default_factory_not_called":  # derived from a wrong value
            found.setdefault(key_of(error["loc"], root)[0], _translate(error, root, sources, prog))
    return join_errors(found.values())


def _translate(error: ErrorDetails, root: FieldSchema, sources: Mapping[str, str], prog: str) -> ConfigError:
    path, schema = key_of(error["loc"], root)
    source = find_source(path, sources)
    key = ".".join(path)
    if error["type"] == "missing":
        return fail(f"{key} is required and was not given", f"write --{key} VALUE, or {key} = VALUE in a file")
    if error["type"] == "extra_forbidden":
        section, chosen = key_of(error["loc"][:-1], root)[1], error["loc"][-2] if len(error["loc"]) > 1 else None
        other = section.tag and path[-1] in fields_of(section)
        return wrong_variant(path, source, section, chosen) if other else unknown_key(path, source, root, prog)
    if error["type"] in ("value_error", "assertion_error") and schema.kind == "section":
        problem = explain(error, schema)[0]
        return ConfigError(f"{key}: {problem}" if key else problem)
    problem, hint = explain(error, schema)
    return wrong_value(path, error["input"], source, problem, hint, schema)


def find_source(path: KeyPath, sources: Mapping[str, str]) -> str:
    """The source of a key's value: its own or that of the nearest parent key."""
    for end in range(len(path), 0, -1):
        if source := sources.get(".".join(path[:end])):
            return source
    return "default"
