"""Configuration sources: TOML files with inheritance, PRIME_ variables, and the command line."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.configuration.errors import COMMAND_LINE, ConfigError, fail, unknown_key
from prime_rl.configuration.foreign_names import translate_name
from prime_rl.configuration.merge import FALSE_WORDS, TRUE_WORDS, ConfigBuilder, RawString
from prime_rl.configuration.schema import FieldSchema, KeyPath, suggest, suggest_key
from rollouts.training.shipped import find_file

PREFIX = "PRIME_"
NOT_SETTINGS = ("PRIME_INTELLECT_", "PRIME_API_KEY", "PRIME_RL_")
"""Beginnings of variables that set no key: credentials, and PRIME_RL_ for those that `rl` sets for its processes."""
TOML_HINT = "text needs quotes, a section is [name], a list is [1, 2], a switch is true or false"
HEADER = re.compile(r"^\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
ASSIGNMENT = re.compile(r"""^\s*([\w.\-"' ]+?)\s*=""")


@dataclass(frozen=True)
class Option:
    """One command-line option: its normalized key, its schema, and the words that follow it."""

    path: KeyPath
    schema: FieldSchema
    words: list[RawString]
    off: bool = False


@dataclass(frozen=True)
class Arguments:
    """A parsed command line: files with their target section, and options."""

    files: list[tuple[KeyPath, str]]
    options: list[Option]


def read_environment(builder: ConfigBuilder, environ: Mapping[str, str]) -> list[str]:
    """Merge PRIME_A__B variables into the draft; returns one warning per variable that matches no key."""
    warnings = []
    names = filter(environ.get, find_settings(environ))
    paths = {name: _read_name(builder, name) for name in sorted(names)}
    for name, path in sorted(paths.items(), key=lambda item: not builder.goes_first(item[1])):
        if builder.find(path):
            with builder.collect_errors():
                builder.put(path, RawString(environ[name]), lambda _, name=name: f"env {name}")  # type: ignore[misc]
            continue
        near = suggest_key(".".join(path), builder.root)
        hint = f"; did you mean {PREFIX}{near.upper().replace('.', '__')}?" if near else ""
        warnings.append(f"{name} is not a key of {builder.prog}, it has no effect{hint}")
    return warnings


def find_settings(environ: Mapping[str, str]) -> list[str]:
    """Names of the variables that may set keys."""
    return [name for name in environ if name.startswith(PREFIX) and not name.startswith(NOT_SETTINGS)]


@contextmanager
def without_settings() -> Iterator[None]:
    """Hide PRIME_ variables from processes that are started meanwhile: the configuration that these get has them."""
    hidden = {name: os.environ.pop(name) for name in find_settings(os.environ)}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _read_name(builder: ConfigBuilder, name: str) -> KeyPath:
    """The key of a variable: in lower case, except that keys of a free-form table may be in mixed case."""
    path: KeyPath = ()
    for part in name[len(PREFIX) :].split("__"):
        located = builder.find(path)
        table = located[1] if located is not None and located[1].kind in ("dict", "any") else None
        is_as_written = table is not None and (table.keeps_case or not part.isupper())
        path = (*path, part if is_as_written else part.lower())
    return path


def read_arguments(builder: ConfigBuilder, argv: Sequence[str]) -> Arguments:
    """Parse a command line by the schemas of its keys; `builder` records unknown options and unexpected words."""
    files: list[tuple[KeyPath, str]] = []
    options: list[Option] = []
    position = 0
    while position < len(argv):
        num_errors = len(builder.errors)
        with builder.collect_errors():
            position = _read_argument(builder, argv, position, files, options)
        if len(builder.errors) > num_errors:  # continue with the next option or file
            position += 2 if _is_before_file(argv, position) else 1
            while position < len(argv) and not _is_option(argv[position]) and argv[position] != "@":
                position += 1
    return Arguments(files, options)


def _read_argument(
    builder: ConfigBuilder, argv: Sequence[str], position: int, files: list[tuple[KeyPath, str]], options: list[Option]
) -> int:
    """Append the option or file at `position`; returns the position of the next one."""
    word = argv[position]
    if word == "@" or (_is_before_file(argv, position) and not _is_switch(builder, word)):
        path = () if word == "@" else _section(builder, word)
        position += 1 if word == "@" else 2
        if position >= len(argv) or _is_option(argv[position]):
            raise fail("`@` must be followed by a file", f"write `{builder.prog} @ path/to/config.toml`")
        files.append((path, argv[position]))
        return position + 1
    if not _is_option(word):
        raise _misplaced(builder, word, options[-1] if options else None)
    option, used = _read_option(builder, word, argv[position + 1 :])
    options.append(option)
    return position + 1 + used


def apply_options(builder: ConfigBuilder, options: Sequence[Option]) -> None:
    """Merge options into the draft: later ones win, repeated lists and tables accumulate, section types go first."""
    gathered: dict[KeyPath, Option] = {}
    for option in options:
        earlier = gathered.get(option.path)
        if earlier and option.schema.kind in ("list", "dict") and not (earlier.off or option.off):
            option = Option(option.path, option.schema, [*earlier.words, *option.words])
        elif earlier:
            del gathered[option.path]
        gathered[option.path] = option
    for option in sorted(gathered.values(), key=lambda option: not builder.goes_first(option.path)):
        with builder.collect_errors():
            builder.put(option.path, _value(option), lambda _: COMMAND_LINE)


def read_file(builder: ConfigBuilder, prefix: KeyPath, name: str) -> None:
    """Merge a TOML file into the draft below `prefix`, after the files it inherits from (`toml_files`)."""
    for table, label in load_layers(name, ()):
        builder.merge(table, lambda path, label=label: label(path[len(prefix) :]), prefix)  # type: ignore[misc]


def load_layers(name: str, above: tuple[Path, ...]) -> list[tuple[dict[str, Any], Callable[[KeyPath], str]]]:
    """The tables of a file and of its base files, base first, each with a function from key to `file:line`."""
    path = find_file(name)
    included_by = f" (from toml_files in {above[-1].name})" if above else ""
    if path.resolve() in above:
        raise fail(f"{name} inherits from itself through toml_files", "remove it from one of the toml_files lists")
    text = _load_text(path, name + included_by)
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise fail(f"{name} is nested too deeply", "write nested values as sections: [name.inner]") from None
    except tomllib.TOMLDecodeError as error:
        raise fail(
            f"{name} is not valid TOML: {error}",
            TOML_HINT,
        ) from None
    bases = table.pop("toml_files", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise fail(f"toml_files = {bases!r} ({name}) must be a list of paths", 'write toml_files = ["base.toml"]')
    lines = find_lines(text)
    layers = [
        layer
        for base in bases
        for layer in load_layers(str(path.parent / Path(base).expanduser()), (*above, path.resolve()))
    ]
    return [*layers, (table, lambda key: _line_label(name, key, lines))]


def find_lines(text: str) -> dict[str, int]:
    """The line of each dotted key in TOML text, for messages (an inline table counts as one key)."""
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    section, fence = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        if not fence and (header := HEADER.match(line)):
            section = re.sub(r"[\s\"']", "", header[2])
            parent = next((p for p in sorted(counts, key=len, reverse=True) if section.startswith(p + ".")), None)
            if parent:
                section = f"{parent}.{counts[parent]}{section[len(parent) :]}"
            if header[1] == "[[":
                counts[section] = counts.get(section, -1) + 1
                section = f"{section}.{counts[section]}"
            lines.setdefault(section, number)
        elif not fence and (key := ASSIGNMENT.match(line)):
            lines[".".join(filter(None, (section, re.sub(r"[\s\"']", "", key[1]))))] = number
        for mark in re.findall(r'"""|\'\'\'', line):
            fence = "" if fence == mark else fence or mark
    return lines


def _line_label(name: str, key: KeyPath, lines: Mapping[str, int]) -> str:
    for end in range(len(key), 0, -1):
        if number := lines.get(".".join(key[:end])):
            return f"{name}:{number}"
    return name


def _load_text(path: Path, name: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # editors of Windows begin a file with a mark
    except IsADirectoryError:
        inside = ", ".join(sorted(file.name for file in path.glob("*.toml"))[:5])
        raise fail(f"{name} is a directory, not a TOML file", f"in it: {inside}" if inside else None) from None
    except UnicodeDecodeError:
        raise fail(f"{name} is not a text file in UTF-8", "give a TOML file after `@`") from None
    except OSError as error:
        if path.exists():
            raise fail(f"{name} cannot be read: {error.strerror}", "check its permissions") from None
        raise fail(f"there is no file {name}", _nearby(path)) from None


def _nearby(path: Path) -> str:
    """A hint for a missing file: similar names next to it, else the directory's files, else the nearest directory."""
    parent = path.parent
    if not parent.is_dir():
        existing = next(folder for folder in parent.parents if folder.is_dir())
        return f"its directory {parent} does not exist (in {existing.resolve()})"
    files = sorted(file.name for file in parent.glob("*.toml"))
    near = suggest(path.name, files)
    if near:
        return f"did you mean {parent / near}?"
    return f"TOML files there: {', '.join(files[:5])}" if files else f"{parent.resolve()} has no TOML files"


def _is_option(word: str) -> bool:
    return word.startswith("--") and word[2:3].isalpha()


def _is_before_file(argv: Sequence[str], position: int) -> bool:
    """Whether an option without a value of its own stands before `@ file`."""
    word = argv[position]
    follows = position + 1 < len(argv) and argv[position + 1] == "@"
    return follows and _is_option(word) and "=" not in word


def _is_switch(builder: ConfigBuilder, word: str) -> bool:
    """Whether an option needs no value, so that a file behind it is for the whole configuration."""
    path = tuple(word[2:].split("."))
    located = builder.find(path)
    return located[1].is_bool if located is not None else _find_negated(builder, path) is not None


def _section(builder: ConfigBuilder, word: str) -> KeyPath:
    path = tuple(word[2:].split("."))
    located = builder.find(path)
    if located is None:
        raise unknown_key(path, COMMAND_LINE, builder.root, builder.prog)
    if located[1].kind not in ("section", "dict"):
        raise fail(f"{word} is a single value, it cannot be read from a file", f"write `{word} VALUE`")
    return located[0]


def _misplaced(builder: ConfigBuilder, word: str, last: Option | None) -> ConfigError:
    if word.startswith("@"):
        name = " ".join(word[1:].split()) or "FILE"  # in one line, whatever a shell passes on
        return fail(f"@{name}: a space is missing after `@`", f"write `@ {name}`")
    if word.endswith(".toml"):
        return fail(f"{word} stands alone", f"write `@ {word}` to read the file")
    if word.startswith("-") and not word.startswith("--"):
        return fail(f"unknown option {word}", f"options start with two dashes: -{word}")
    if last:
        takes = "true or false" if last.schema.is_bool else "one value" if last.words else "no value"
        return fail(f"unexpected word {word!r}", f"--{'.'.join(last.path)} before it takes {takes}")
    name = word.partition("=")[0].strip("-+")
    other = translate_name(tuple(name.split(".")), builder.root)
    near = name if name in ("help", "version") else other[0] if other else suggest_key(name, builder.root)
    return fail(f"unexpected word {word!r}", f"did you mean --{near}?" if near else "options look like --key value")


def _read_option(builder: ConfigBuilder, word: str, rest: Sequence[str]) -> tuple[Option, int]:
    """One option and the number of following words that belong to it."""
    name, equals, inline = word[2:].partition("=")
    path = tuple(name.split("."))
    located, off = builder.find(path), False
    if located is None:
        located, off = _find_negated(builder, path), True
    if located is None:
        if rest and rest[0].endswith(".toml"):
            raise fail(f"unknown option {word}", f"write `@ {rest[0]}` to read the file")
        raise unknown_key(path, COMMAND_LINE, builder.root, builder.prog)
    path, schema = located
    if off:
        if equals or not (schema.is_bool or schema.optional):
            problem = "takes no value" if equals else f"cannot be switched off: --{'.'.join(path)} always has a value"
            raise fail(f"--{name} {problem}", f"write --{'.'.join(path)} VALUE")
        return Option(path, schema, [], off=True), 0
    words = [inline] if equals else _following(schema, rest)
    if not words and not (schema.is_bool or schema.kind == "section"):
        raise fail(f"--{name} needs a value ({schema.describe()})", f"write --{name} VALUE")
    return Option(path, schema, [RawString(value) for value in words]), 0 if equals else len(words)


def _find_negated(builder: ConfigBuilder, path: KeyPath) -> tuple[KeyPath, FieldSchema] | None:
    """The key negated by `--no-a.b` or `--a.no-b`."""
    for index in (0, len(path) - 1):
        if path[index].startswith(("no-", "no_")):
            return builder.find((*path[:index], path[index][3:], *path[index + 1 :]))
    return None


def _following(schema: FieldSchema, rest: Sequence[str]) -> list[str]:
    words: list[str] = []
    for word in rest:
        if _is_option(word) or word.startswith("@"):
            break
        words.append(word)
    if schema.is_bool:
        return words[:1] if words and (words[0].lower() in TRUE_WORDS + FALSE_WORDS or words[0] == "None") else []
    return words if schema.kind in ("list", "dict", "any") else words[:1]


def _value(option: Option) -> Any:
    if option.off:
        return False if option.schema.is_bool else None
    if not option.words:
        return True if option.schema.is_bool else {}
    return option.words if len(option.words) > 1 or option.schema.kind == "list" else option.words[0]
