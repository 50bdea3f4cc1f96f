"""Parses the sources into modules with their imports, for the architecture test and the reports."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARCHITECTURE = Path(__file__).with_name("architecture.toml")


@dataclass
class Module:
    """One parsed source file."""

    name: str
    text: str
    tree: ast.Module
    is_package: bool = False
    classes: list[ast.ClassDef] = field(default_factory=list)
    eager: set[str] = field(default_factory=set)
    """Modules that are imported when this one is loaded."""
    imports: dict[str, int] = field(default_factory=dict)
    """All imported modules, also those inside functions and under `TYPE_CHECKING` -> first line."""


@dataclass(frozen=True)
class Package:
    """A row of the architecture table: the modules that form one unit, and the layer they are in (0 is the lowest)."""

    name: str
    modules: tuple[str, ...]
    layer: int
    layer_name: str
    about: str
    is_independent: bool
    """Packages of its layer do not import each other."""


def is_inside(module: str, *packages: str) -> bool:
    """Whether `module` is one of `packages` or below one."""
    return any(module == package or module.startswith(package + ".") for package in packages)


def read_modules(src: Path) -> dict[str, Module]:
    """All modules below `src` by dotted name."""
    modules: dict[str, Module] = {}
    for path in sorted(src.rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, text, ast.parse(text), is_package)
    for module in modules.values():
        for node, eager in _walk(module):
            if isinstance(node, ast.ClassDef):
                module.classes.append(node)
            for name in _imported_names(node, module, modules):
                line = getattr(node, "lineno", 0)
                module.imports[name] = min(line, module.imports.get(name, line))
                if eager:
                    module.eager.add(name)
    return modules


def read_architecture(path: Path = ARCHITECTURE) -> dict[str, Any]:
    """The tables of `architecture.toml`."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def list_packages(architecture: Mapping[str, Any]) -> list[Package]:
    """The packages of all layers, top layer first."""
    layers = architecture["layer"]
    return [
        Package(
            row["name"].split(" + ")[0],
            tuple(row["name"].split(" + ")),
            len(layers) - 1 - i,
            layer["name"],
            row["about"],
            layer.get("independent", False),
        )
        for i, layer in enumerate(layers)
        for row in layer["packages"]
    ]


def find_package(module: str, packages: list[Package]) -> Package | None:
    """The package that `module` belongs to: the one with the longest name that contains it."""
    homes = {name: package for package in packages for name in package.modules}
    parts = module.split(".")
    names = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
    return next((homes[name] for name in names if name in homes), None)


def find_cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node (Tarjan 1972), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(edges.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                cycles.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return sorted(cycles)


def module_edges(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Imports between the given modules, lazy ones and those for types included."""
    return {
        name: {target for target in module.imports if target in modules} - {name} for name, module in modules.items()
    }


def _imported_names(node: ast.AST, module: Module, known: Mapping[str, Module]) -> Iterator[str]:
    """Absolute names of the modules that an import statement or `import_module("...")` loads."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
            base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
        for alias in node.names:
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base
    elif isinstance(node, ast.Call) and node.args and _last_name(node.func) == "import_module":
        yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def _last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`, and of `c`."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _walk(module: Module) -> Iterator[tuple[ast.AST, bool]]:
    """Statements, with False inside functions and `if TYPE_CHECKING:`, and expressions if `import_module` occurs."""
    pending: list[tuple[ast.AST, bool]] = [(module.tree, True)]
    skipped: tuple[type, ...] = () if "import_module" in module.text else (ast.expr,)
    while pending:
        node, eager = pending.pop()
        for_types = isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING"
        for child in ast.iter_child_nodes(node):
            if isinstance(child, skipped):
                continue
            lazy = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            if isinstance(node, ast.If) and for_types and child not in node.orelse:
                lazy = True
            pair = child, eager and not lazy
            yield pair
            pending.append(pair)
