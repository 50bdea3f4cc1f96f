"""Reference pages of the site, written from the source: configuration keys of every command, and the Python API."""

from __future__ import annotations

import html
import inspect
import pkgutil
import re
from collections.abc import Collection, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from prime_rl.configuration.help import describe_field
from prime_rl.configuration.render import render_value
from prime_rl.configuration.schema import FieldSchema, default_of, field_schema

COMMANDS = {
    "rl": "prime_rl.config:RLConfig",
    "sft": "prime_rl.trainer.config:SFTConfig",
    "eval": "prime_rl.eval.config:EvalConfig",
    "evolve": "prime_rl.evolve.config:EvolveConfig",
    "synthesize": "prime_rl.synthesize.config:SynthesizeConfig",
    "inference": "prime_rl.inference.config:InferenceConfig",
    "trainer": "prime_rl.trainer.config:TrainConfig",
    "orchestrator": "prime_rl.orchestrator.config:OrchestratorConfig",
    "plan": "prime_rl.plan.config:PlanConfig",
    "serve": "prime_rl.training_api.config:ServeConfig",
}
PACKAGES = ("rollouts.training", "rollouts.kernels", "nanochat")
OPTIONAL = ("triton",)
"""Packages without which the pages leave out the modules that import them."""


def write_pages(folder: Path) -> None:
    """Write one page for each command and each package below `folder`, unchanged files untouched."""
    configs = {command: _load(where) for command, where in COMMANDS.items()}
    pages = {f"config/{command}": _config_page(command, configs) for command in configs}
    pages |= {f"api/{package}": _package_page(package) for package in PACKAGES}
    for name, text in pages.items():
        path = folder / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def _load(location: str) -> type[BaseModel]:
    module, name = location.split(":")
    config_cls: type[BaseModel] = getattr(import_module(module), name)
    return config_cls


def _config_page(command: str, configs: dict[str, type[BaseModel]]) -> str:
    """All keys of a command; sections that are another command's configuration are links to its page."""
    config_cls = configs[command]
    links = {cls: name for name, cls in configs.items() if name != command}
    base = next((cls for cls in config_cls.__mro__ if cls in links), None)
    lines = [f"# Keys of `{command}`\n", f"`{command} --help all` prints the same in a terminal.\n"]
    if base:
        lines.append(f"In addition to those of [{links[base]}]({links[base]}.md):\n")
    skip = set(base.model_fields) if base else set()
    return "\n".join([*lines, *_tables(config_cls, (), links, skip)])


def _tables(
    config_cls: type[BaseModel], path: tuple[str, ...], links: dict[type[BaseModel], str], skip: Collection[str] = ()
) -> Iterator[str]:
    """A table of the keys of one section, then the sections below it."""
    rows, below = [], []
    for name, field in config_cls.model_fields.items():
        schema, meaning = field_schema(field), describe_field(config_cls, name)
        sections = schema.sections or (schema.item.sections if schema.item else ())
        if name in skip:
            continue
        if sections:
            below.append((name, schema, meaning, sections))
        else:
            default = "required" if field.is_required() else _value(default_of(field))
            rows.append(f"| `{name}` | {_kind(schema)} | {default} | {_cell(meaning)} |")
    if rows:
        yield "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"
    for name, schema, meaning, sections in below:
        for section in sections:
            key = ".".join((*path, name))
            title = f"[[{key}]]" if schema.kind == "list" else f"[{key}]"
            if schema.tag and len(schema.sections) > 1:
                choice = field_schema(section.model_fields[schema.tag]).choices[0]
                title += f" with {schema.tag} = {choice}"
            yield f"## `{title}`\n\n{_escape(meaning or ' '.join((section.__doc__ or '').split()))}\n"
            other = next((links[cls] for cls in section.__mro__ if cls in links), None)
            if other:
                yield f"The keys of [{other}]({other}.md).\n"
            else:
                yield from _tables(section, (*path, name), links)


def _kind(schema: FieldSchema) -> str:
    return ", ".join(f"`{choice}`" for choice in schema.choices) or schema.describe().replace("|", " or ")


def _value(value: Any) -> str:
    return "unset" if value is None else f"`{_cell(render_value(value))}`"


def _cell(text: str) -> str:
    return _escape(text).replace("|", "\\|").replace("\n", " ")


def _escape(text: str) -> str:
    """Markdown in which nothing but `code` has a meaning."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part[:1] == "`" else re.sub(r"([*_\[\]<>$])", r"\\\1", part) for part in parts)


def _package_page(package: str) -> str:
    root = import_module(package)
    blocks = [f"# {package}\n\n{_escape(inspect.getdoc(root) or '')}\n"]
    for info in pkgutil.walk_packages(root.__path__, f"{package}."):
        if not info.name.rsplit(".", 1)[-1].startswith("_"):
            blocks += _module_blocks(info.name)
    return "\n".join(blocks)


def _module_blocks(name: str) -> list[str]:
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name in OPTIONAL:
            return []
        raise
    members = [
        member
        for key, member in vars(module).items()
        if not key.startswith("_")
        and (inspect.isclass(member) or inspect.isfunction(member))
        and member.__module__ == name
    ]
    if not members:
        return []
    blocks = [f"## `{name}`\n", _prose(inspect.getdoc(module))]
    for member in members:
        blocks += [f"### `{member.__name__}`\n", _signature(member), _prose(inspect.getdoc(member))]
        if inspect.isclass(member) and not issubclass(member, BaseException):
            for key, method in vars(member).items():
                if not key.startswith("_") and inspect.isfunction(method) and method.__doc__:
                    blocks += [f"#### `{member.__name__}.{key}`\n", _signature(method), _prose(inspect.getdoc(method))]
    return blocks


def _named(default: Any) -> Any:
    """A default value; classes and functions by their names, which is how they are written."""
    is_named = inspect.isclass(default) or inspect.isfunction(default)
    return _Unquoted(default.__name__) if is_named and default is not inspect.Parameter.empty else default


class _Unquoted:
    """An annotation that was written as text, shown without quotes."""

    def __new__(cls, annotation: Any) -> Any:
        return super().__new__(cls) if isinstance(annotation, str) else annotation

    def __init__(self, annotation: str) -> None:
        self.text = annotation

    def __repr__(self) -> str:
        return self.text


def _signature(member: Any) -> str:
    try:
        signature = inspect.signature(member)
    except (TypeError, ValueError):
        return ""
    parameters = [
        p.replace(annotation=_Unquoted(p.annotation), default=_named(p.default)) for p in signature.parameters.values()
    ]
    signature = signature.replace(parameters=parameters, return_annotation=_Unquoted(signature.return_annotation))
    text = f"{member.__name__}{signature}"
    if len(text) > 100:
        text = re.sub(r"^(\w+)\((.*)\)( -> .*)?$", _one_argument_per_line, text, flags=re.DOTALL)
    return f"```python\n{text}\n```\n"


def _one_argument_per_line(match: re.Match[str]) -> str:
    depth, parts, current = 0, [], ""
    for letter in match[2]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += letter
    lines = "".join(f"    {part},\n" for part in (*parts, current.strip()) if part)
    return f"{match[1]}(\n{lines}){match[3] or ''}"


def _prose(docstring: str | None) -> str:
    """A docstring as Markdown: indented lines (formulas, tables) are shown as written."""
    out: list[str] = []
    for block in re.split(r"\n\s*\n", docstring or ""):
        lines = block.split("\n")
        while lines:
            literal = lines[0].startswith("    ")
            run = [lines.pop(0)]
            while lines and lines[0].startswith("    ") == literal:
                run.append(lines.pop(0))
            text = inspect.cleandoc("\n".join(run)) if literal else " ".join(run)
            out.append(f"```text\n{text}\n```" if literal else _escape(html.unescape(text)))
    return "\n\n".join(out) + "\n"
