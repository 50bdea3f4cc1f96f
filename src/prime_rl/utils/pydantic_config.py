"""Configuration of every command: `BaseConfig`, and from an argument list to a checked config or a clear message."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator

from prime_rl.utils.config_draft import Draft
from prime_rl.utils.config_errors import ConfigError, translate
from prime_rl.utils.config_keys import field_shape, variant
from prime_rl.utils.config_sources import apply_options, read_arguments, read_environment, read_file

__all__ = [
    "BaseConfig",
    "ConfigError",
    "merge_tables",
    "note",
    "note_source",
    "parse_argv",
    "run_command",
    "write_config",
]

Config = TypeVar("Config", bound="BaseConfig")
Provenance = dict[str, str]


class BaseConfig(BaseModel):
    """A section or a whole configuration: unknown keys are errors, and nothing is written to after parsing."""

    # What stands below a field is read where the help needs it: pydantic would parse the source of every class
    # at import, a sixth of the start of every process.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    spellings: ClassVar[Mapping[str, str]] = {}
    """Other documented names of keys: name -> dotted key below this section."""

    @cached_property
    def provenance(self) -> Provenance:
        """Dotted key -> where its value came from; keys that are missing have their default."""
        return {}

    @cached_property
    def notes(self) -> list[str]:
        """What was changed or ignored while parsing, for the user to read."""
        return []

    @model_validator(mode="before")
    @classmethod
    def _complete_sections(cls, data: Any) -> Any:
        """A section given in part keeps the other values, and the type, of the default that this class has for it."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for name, field in cls.model_fields.items():
            if not isinstance(data.get(name), dict) or field.is_required():
                continue
            default = field.get_default(call_default_factory=True)
            if not isinstance(default, BaseModel):
                continue
            given, shape = data[name], field_shape(field)
            if shape.tag and variant(shape, given.get(shape.tag, getattr(default, shape.tag))) is not type(default):
                continue
            tag = {shape.tag: getattr(default, shape.tag)} if shape.tag else {}
            data[name] = merge_tables({**default.model_dump(exclude_unset=True), **tag}, given)
        return data


def note_source(info: ValidationInfo, key: str, source: str) -> None:
    """For validators that fill keys: record that the dotted `key` got its value from `source`."""
    if isinstance(info.context, dict):
        info.context["sources"][key] = source


def note(info: ValidationInfo, text: str) -> None:
    """For validators: one line that the command prints before it starts."""
    if isinstance(info.context, dict):
        info.context["notes"].append(text)


def parse_argv(
    config_cls: type[Config], argv: Sequence[str], prog: str, environ: Mapping[str, str] | None = None
) -> tuple[Config, Provenance]:
    """The config of an argument list (without the program) and the source of each value; raises ConfigError.

    Precedence: options > `@` files from left to right > PRIME_A__B variables > defaults.
    """
    draft = Draft(config_cls, prog)
    arguments = read_arguments(draft, argv)
    notes = [f"warning: {text}" for text in read_environment(draft, os.environ if environ is None else environ)]
    for prefix, name in arguments.files:
        read_file(draft, prefix, name)
    apply_options(draft, arguments.options)
    context = {"sources": draft.sources, "notes": notes}
    try:
        config = config_cls.model_validate(draft.values, context=context)
    except ValidationError as error:
        raise translate(error.errors(), draft.root, draft.sources, prog) from None
    _attach_sources(config, draft.sources)
    config.notes.extend(notes)
    return config, config.provenance


def write_config(config: BaseConfig, path: Path, provenance: Mapping[str, str] | None = None) -> None:
    """Write the resolved config as TOML that `@` reads back, with the source of each value as a comment.

    It may hold keys (headers, arguments of environments), so its owner alone may read it.
    """
    from prime_rl.utils.config_toml import render_toml

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.touch(0o600)
    temporary.write_text(render_toml(config, config.provenance if provenance is None else provenance), encoding="utf-8")
    temporary.replace(path)


def run_command(
    prog: str,
    config_cls: type[Config],
    run: Callable[[Config], int | None],
    *,
    summary: str,
    explain: Callable[[Config], list[str]] = lambda _: [],
    preview: Callable[[Config], str | None] = lambda _: None,
    record: bool = False,
) -> NoReturn:
    """A command's whole life: read its arguments, run it, exit with 0 (good), 2 (wrong input) or 1 (failed).

    `explain` gives lines that --dry-run shows before the values, as comments; `preview` gives text
    that it shows in their place. With `record` the values are written to
    `<output_dir>/configs/<prog>.toml`.
    """
    argv = sys.argv[1:]
    debug, wants_help, dry_run = "--debug" in argv, "--help" in argv or "-h" in argv, "--dry-run" in argv
    argv = [word for word in argv if word not in ("--debug", "--help", "-h", "--dry-run")]
    try:
        if wants_help:
            raise SystemExit(_show_help(prog, config_cls, argv, summary))
        config, _ = parse_argv(config_cls, argv, prog)
        for text in config.notes:
            sys.stderr.write(f"{text}\n")
        # Processes that this one starts get their part of the config as a file; variables must not reach them again.
        for source in {source for source in config.provenance.values() if source.startswith("env ")}:
            os.environ.pop(source.removeprefix("env "), None)
        if dry_run:
            from prime_rl.utils.config_toml import render_toml

            if (files := preview(config)) is not None:
                sys.stdout.write(files)
                raise SystemExit(0)
            comments = "".join(f"# {line}\n" for line in explain(config))
            sys.stdout.write(comments + render_toml(config, config.provenance))
            raise SystemExit(0)
        _check_output_dir(config)
        if record:
            _record(config, prog)
        raise SystemExit(run(config) or 0)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader of our output (a pager, head) has gone; Python must not complain about it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except Exception as error:
        if debug:
            raise
        raise SystemExit(_show_error(error)) from None


def _check_output_dir(config: BaseConfig) -> None:
    """A directory that cannot be written is told before anything starts, by its key."""
    path = getattr(config, "output_dir", None)
    if not isinstance(path, Path):
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(path, os.W_OK | os.X_OK) else "no permission to write there"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason is not None:
        raise ConfigError(f"output_dir {path} cannot be written ({reason}): choose another --output-dir")


def _record(config: BaseConfig, prog: str) -> None:
    """Write what a command runs with, unless it was read from that very file: the sources in there say more."""
    out_dir = config.model_dump(include={"output_dir"})["output_dir"]
    path = Path(out_dir).resolve() / "configs" / f"{prog}.toml"
    files = {Path(source.rpartition(":")[0]) for source in config.provenance.values() if ":" in source}
    if path not in {file.resolve() for file in files}:
        write_config(config, path)


def _show_error(error: BaseException) -> int:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    if isinstance(error, ValueError):
        sys.stderr.write("\n".join(f"error: {error}".splitlines()[:3]) + "\n")
        return 2
    # The logger is there only if the command got as far as setting it up.
    logger = sys.modules.get("prime_rl.utils.logger")
    where = "in the log file, or with --debug" if logger and logger.log_failure(error) else "with --debug"
    sys.stderr.write(f"error: {str(error) or type(error).__name__}\n  ({type(error).__name__}; traceback {where})\n")
    return 1


def _show_help(prog: str, config_cls: type[Config], argv: Sequence[str], summary: str) -> int:
    """Print the help, with the merged values where there are any; returns the exit code."""
    from prime_rl.utils.config_help import colour, render_help

    config, problem = None, None
    try:
        config, _ = parse_argv(config_cls, argv, prog)
    except ConfigError as error:
        problem = error if argv else None
    # Without files, options and variables the defaults say more than what validators made of them.
    given = config and any(not source.startswith("shared key") for source in config.provenance.values())
    shown = config if given else None
    sys.stdout.write(colour(render_help(prog, config_cls, shown, summary)) + "\n")
    return _show_error(problem) if problem else 0


def merge_tables(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, key by key at any depth."""
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merge_tables(result[key], value) if both else value
    return result


def _attach_sources(config: BaseConfig, sources: Mapping[str, str]) -> None:
    """Give each section its own view of the sources, so that a part can be written out alone."""
    config.provenance.update(sources)
    for name in type(config).model_fields:
        section = getattr(config, name)
        if isinstance(section, BaseConfig):
            below = {key[len(name) + 1 :]: source for key, source in sources.items() if key.startswith(name + ".")}
            _attach_sources(section, below)
