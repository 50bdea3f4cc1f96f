"""Prints the size and structure of the code base as a table: `python dev/code_report.py [TREE ...]`.

A TREE is a directory with `src/` in it, or a git revision of this repository; without one, the working tree. Several
are printed side by side. Exits with 1 if the last tree has import circles, layering exceptions, class names that exist
twice, banned words, or undocumented modules in `utils`.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from source_tree import (
    find_cycles,
    find_package,
    list_packages,
    module_edges,
    read_architecture,
    read_modules,
)

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rollouts", "prime_rl", "nanochat")
NESTING = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> int:
    trees = sys.argv[1:] or [str(ROOT)]
    with ExitStack() as stack:
        roots = [_checkout(tree, stack) for tree in trees]
        for tree, root in zip(trees, roots, strict=True):
            print(f"{'.' if Path(tree) == ROOT else tree}\n")
            print(_size_table(root))
        checks = [count_defects(root) for root in roots]
    print("| structure | " + " | ".join(Path(tree).name for tree in trees) + " |")
    print("|---|" + "---|" * len(trees))
    for name in checks[0]:
        print(f"| {name} | " + " | ".join(str(check[name]) for check in checks) + " |")
    return int(any(checks[-1].values()))


def count_defects(root: Path) -> dict[str, int]:
    """Numbers that should be 0."""
    architecture = read_architecture()
    modules = read_modules(root / "src")
    packages = list_packages(architecture)
    upward = 0
    for name, targets in module_edges(modules).items():
        here = find_package(name, packages)
        for target in targets:
            there = find_package(target, packages)
            if here and there and here != there:
                upward += there.layer > here.layer or (there.layer == here.layer and here.is_independent)
    classes = Counter(node.name for module in modules.values() for node in module.classes)
    utils = {path.stem for path in (root / "src/prime_rl/utils").glob("*.py")}
    return {
        "import circles (lazy and type imports count)": len(find_cycles(module_edges(modules))),
        "imports against the layers": upward,
        "class names that exist twice": sum(
            n > 1 for name, n in classes.items() if name not in architecture["same_class_name"]
        ),
        "banned words": sum(1 for _ in find_banned_words(root, architecture["language"])),
        "modules in utils besides the documented": len(
            utils - {"__init__", "pydantic_config", "monitor", "logger", "vf", "client"}
        ),
    }


def find_banned_words(root: Path, language: Mapping[str, Any]) -> Iterator[tuple[Path, int, str]]:
    """Path, line and word of each banned word in the code, comments and pages of the folders of `language`."""
    pattern = re.compile(r"(?<![\w./-])(" + "|".join(language["words"]) + r")(?![\w/-])", re.IGNORECASE)
    words = tuple(map(str.lower, language["words"]))
    for folder in language["folders"]:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in (".py", ".md", ".c", ".js", ".toml") or "_build" in path.parts:  # built pages
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if not any(map(line.lower().__contains__, words)):  # quicker than the pattern
                    continue
                if path.suffix == ".toml":  # comments only: environments keep word problems in such files
                    line = line.partition("#")[2]
                yield from ((path, number, match.group(1)) for match in pattern.finditer(line))


def _checkout(tree: str, stack: ExitStack) -> Path:
    if (Path(tree) / "src").is_dir():
        return Path(tree).resolve()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", tree], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def _size_table(root: Path) -> str:
    rows = [
        "| package | files | lines | code | file median/max | function median/p90/max | classes | > 6 params "
        "| nesting > 4 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    folders = [root / "src" / name for name in PACKAGES]
    rows += [_size_row(folder.name, [folder]) for folder in folders]
    rows += [_size_row("**src**", folders), _size_row("tests", [root / "tests"])]
    return "\n".join(rows) + "\n"


def _size_row(name: str, folders: list[Path]) -> str:
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    trees = [ast.parse(text) for text in texts]
    lines = [len(text.splitlines()) for text in texts]
    functions = [n for tree in trees for n in ast.walk(tree) if isinstance(n, Function)]
    lengths = sorted((f.end_lineno or f.lineno) - f.lineno + 1 for f in functions)

    def count(test: Callable[[Function], bool]) -> int:
        return sum(map(test, functions))

    return (
        f"| {name} | {len(paths)} | {sum(lines):,} | {sum(map(_code_lines, texts)):,} "
        f"| {statistics.median(lines):.0f}/{max(lines)} "
        f"| {statistics.median(lengths):.0f}/{lengths[int(len(lengths) * 0.9)]}/{lengths[-1]} "
        f"| {sum(isinstance(n, ast.ClassDef) for tree in trees for n in ast.walk(tree))} "
        f"| {count(lambda f: len([*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]) > 6)} "
        f"| {count(lambda f: _depth(f) > 4)} |"
    )


def _code_lines(text: str) -> int:
    """Lines that hold code: no blanks, comments or docstrings."""
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skip:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _depth(node: ast.AST) -> int:
    """How deep loops, conditions and `with` blocks are nested; `elif` does not count as deeper."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, _depth(child) + (isinstance(child, NESTING) and not is_elif))
    return deepest


if __name__ == "__main__":
    raise SystemExit(main())
