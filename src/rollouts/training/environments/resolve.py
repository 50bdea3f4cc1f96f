"""Resolves an environment id to its source and parameters, without importing it."""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from rollouts.training.shipped import shipped_dir

FACTORY = "load_environment"
VERIFIERS_RANGE = ">=0.1.9.post3,<0.1.11"
NAME = re.compile(r"(?:(?P<org>[\w.-]+)/)?(?P<name>[A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)*)(?:@(?P<version>[\w.]+))?")


@dataclass(frozen=True)
class EnvSource:
    """Location of an environment's code: `module` is imported with `folder` on the path, then `factory` is called."""

    env_id: str
    module: str
    folder: Path | None = None
    file: Path | None = None
    """The Python source file; None if it cannot be determined without an import."""
    factory: str = FACTORY


@dataclass(frozen=True)
class Parameters:
    """Parameters of a factory."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_any: bool


def find_environment(env_id: str, search_dirs: Sequence[Path] | None = None) -> EnvSource:
    """Locate environment `env_id`; `ValueError` lists the available ones.

    reverse-text, org/reverse-text    a folder in `search_dirs` (default: `environments` in the working directory and
                                      those that ship with the package), then an installed module reverse_text
    org/reverse-text@0.2              that version, if it is an installed module
    module:factory                    a function of any importable module, `verifiers` or not
    ./folder, ./file.py[:factory]     code at a path
    """
    target, factory = _split_factory(env_id)
    if target.startswith((".", "/", "~")) or target.endswith(".py"):
        return _find_path(env_id, target, factory)
    match = NAME.fullmatch(target)
    if match is None:
        raise ValueError(
            f"environment {env_id!r} is not a name: write reverse-text, org/reverse-text, module:factory or ./path.py"
        )
    name = match["name"].replace("-", "_")
    roots = _default_search_dirs() if search_dirs is None else [Path(root) for root in search_dirs]
    for root in roots:
        folder = root.resolve() / name
        if (file := _source_in(folder, name)) is not None:
            return EnvSource(env_id, name, folder, file, factory)
    file = _find_module(name)
    if file is None:
        raise ValueError(_describe_unknown(env_id, name, roots))
    if match["version"]:
        _check_version(env_id, name, match["version"])
    return EnvSource(env_id, name, None, file if file.suffix == ".py" else None, factory)


def _check_version(env_id: str, name: str, version: str) -> None:
    """Raise `ValueError` if another version of the package is installed; "latest" is any."""
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return
    if version not in (found, "latest") and not _is_in_range(found, f"=={version}"):
        raise ValueError(
            f"environment {env_id!r}: version {found} is installed; install version {version}, set env.install = true, "
            "or correct the version in env.id"
        )


def find_parameters(env_id: str) -> Parameters | None:
    """Parameters of an environment's factory, without imports; None if they or the environment are unknown."""
    try:
        source = find_environment(env_id)
        tree = None if source.file is None else ast.parse(source.file.read_bytes(), str(source.file))
    except (ValueError, SyntaxError, OSError):
        return None
    return None if tree is None else _read_parameters(tree, source.factory)


def check_environment(
    env_id: str, args: dict[str, Any] | None = None, *, search_dirs: Sequence[Path] | None = None
) -> EnvSource:
    """`find_environment`, and check the arguments against the factory's, without imports. Raises `ValueError`."""
    source = find_environment(env_id, search_dirs)
    if source.file is None:
        return source
    try:
        tree = ast.parse(source.file.read_bytes(), str(source.file))
    except (SyntaxError, OSError) as error:
        raise ValueError(f"environment {env_id!r} did not import: {type(error).__name__}: {error}") from error
    imported = {name for node in ast.walk(tree) for name in _imported_names(node)}
    if "verifiers" in imported:
        check_verifiers()
    parameters = _read_parameters(tree, source.factory)
    if parameters is not None:
        check_args(env_id, parameters, args or {})
    elif source.factory not in _bound_names(tree):
        raise ValueError(
            f"environment {env_id!r}: {source.file} has no function {source.factory}; "
            "is it another package of that name?"
        )
    return source


def check_args(env_id: str, parameters: Parameters, args: dict[str, Any]) -> None:
    """Raise `ValueError` for unknown or missing arguments."""
    known = ", ".join(parameters.names) or "none"
    unknown = [] if parameters.takes_any else sorted(set(args) - set(parameters.names))
    if unknown:
        raise ValueError(
            f"environment {env_id!r} takes no argument {', '.join(map(repr, unknown))}; it takes {known}: correct "
            "its args"
        )
    if missing := [name for name in parameters.required if name not in args]:
        raise ValueError(
            f"environment {env_id!r} needs the argument {', '.join(map(repr, missing))}: add it to its args"
        )


def check_verifiers() -> None:
    """Raise `ValueError` unless a supported version of `verifiers` is installed."""
    try:
        found = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"verifiers is not installed: pip install 'verifiers{VERIFIERS_RANGE}'") from None
    if not _is_in_range(found, VERIFIERS_RANGE):
        raise ValueError(f"verifiers {found} has another interface: pip install 'verifiers{VERIFIERS_RANGE}'")


def _is_in_range(version: str, specifier: str) -> bool:
    """Whether pip accepts `version` for `specifier`: 0.2.0 for ==0.2."""
    try:
        return SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return False


def list_environments(roots: Sequence[Path]) -> list[str]:
    """Ids of the environments in the folders, written with dashes."""
    found = {
        folder.name.replace("_", "-")
        for root in roots
        if root.is_dir()
        for folder in root.iterdir()
        if _source_in(folder, folder.name) is not None
    }
    return sorted(found)


def _default_search_dirs() -> list[Path]:
    return list(dict.fromkeys([Path.cwd() / "environments", shipped_dir("environments")]))


def _split_factory(env_id: str) -> tuple[str, str]:
    target, colon, factory = env_id.rpartition(":")
    return (target, factory) if colon and factory.isidentifier() and target else (env_id, FACTORY)


def _source_in(folder: Path, name: str) -> Path | None:
    """`folder/name.py` or `folder/name/__init__.py`, as environment packages are laid out."""
    files = (folder / f"{name}.py", folder / name / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _find_path(env_id: str, target: str, factory: str) -> EnvSource:
    path = Path(target).expanduser().resolve()
    name = path.stem.replace("-", "_") if path.suffix == ".py" else path.name.replace("-", "_")
    if path.is_file() and path.suffix == ".py":
        if not name.isidentifier() or name != path.stem:
            raise ValueError(f"environment {env_id!r}: {path.name} cannot be imported: give it a name without dashes")
        return EnvSource(env_id, name, path.parent, path, factory)
    if (file := _source_in(path, name)) is not None:
        return EnvSource(env_id, name, path, file, factory)
    if (path / "__init__.py").is_file():
        return EnvSource(env_id, path.name, path.parent, path / "__init__.py", factory)
    wanted = f"a Python file, or a folder with {name}.py"
    raise ValueError(f"environment {env_id!r}: {path} is not {wanted}: correct the path")


def _find_module(name: str) -> Path | None:
    """The file of an installed module or submodule, without importing its package."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin else Path("?")
    for root in spec.submodule_search_locations or []:
        below = Path(root).joinpath(*rest)
        for file in (below.with_name(below.name + ".py"), below / "__init__.py"):
            if file.is_file():
                return file
    return None


def _describe_unknown(env_id: str, name: str, roots: Sequence[Path]) -> str:
    there = list_environments(roots)
    near = difflib.get_close_matches(name.replace("_", "-"), there, n=1, cutoff=0.6)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    where = " and ".join(str(root) for root in roots) or "no folder"
    return (
        f"environment {env_id!r} was not found{hint}: {where} hold {', '.join(there) or 'none'}, "
        f"and no module {name} is installed; correct env.id, install its package, or set env.install = true"
    )


def _imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    return (
        [node.module.partition(".")[0]] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
    )


def _read_parameters(tree: ast.Module, factory: str) -> Parameters | None:
    """Parameters of the factory if it is defined in this file."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == factory:
            given = node.args
            places = [*given.posonlyargs, *given.args]
            required = places[: len(places) - len(given.defaults)]
            required += [a for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
            names = tuple(argument.arg for argument in [*places, *given.kwonlyargs])
            if node.decorator_list:  # a decorator may change what it takes
                return Parameters(names, (), True)
            return Parameters(names, tuple(argument.arg for argument in required), given.kwarg is not None)
    return None


def _bound_names(tree: ast.Module) -> set[str]:
    """Names that a module may define at its top level; `*` imports may define any."""
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    if "*" in bound or "__getattr__" in bound:
        bound.add(FACTORY)
    return bound
