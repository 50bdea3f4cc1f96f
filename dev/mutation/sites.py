"""Mutation sites: every place of a source file that a mutation operator can change, as replaced source text.

Only the changed expression or statement is rewritten, so that the rest of a file, and every line number, stays.
Left out is what has no behavior to test: docstrings, f-strings, messages of logs and errors, annotations, `__all__`,
assertions (they hold in correct code) and constants that only tune time limits, polling or layout (`TUNING`).
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "ceil": "floor", "floor": "ceil"}
TUNING = re.compile(r"(^|_)(s|timeout|interval|stacklevel|indent|width|backoff|delay|poll)$", re.IGNORECASE)
PATHS = re.compile(r"dir|root|path|folder|directory|['\"]")  # where `/` joins paths
SILENT = ("logger", "warnings", "console")  # calls whose only effect is text
TYPING = ("cast", "TypeVar", "NewType", "Literal", "Annotated")
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Site:
    """One possible mutation: `start:end` of the bytes of `path` become `text`."""

    path: str
    where: str
    """Qualified name of the function or class around it."""
    line: int
    lines: tuple[int, int]
    """The lines whose execution reaches it (first, last)."""
    in_function: bool
    """False for code that runs at import."""
    operator: str
    start: int
    end: int
    text: str
    before: str
    """The changed source, on one line; with `after`, `path` and `where` it identifies the mutation across versions."""
    after: str

    @property
    def key(self) -> str:
        """Identifies the mutation while the function around it stays, wherever its lines move."""
        return f"{self.path}::{self.where}: {self.before} -> {self.after}"

    def apply(self, source: bytes) -> bytes:
        """The mutated source."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def find_sites(root: Path, path: str) -> list[Site]:
    """All mutation sites of the file `path` below `root`, in the order of the source."""
    source = (root / path).read_bytes()
    return list(_Finder(source, path).sites())


class _Finder:
    def __init__(self, source: bytes, path: str) -> None:
        self.source, self.path = source, path
        self.offsets = [0]
        for line in source.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line))

    def sites(self) -> Iterator[Site]:
        yield from self._visit(ast.parse(self.source), [], None)

    def _visit(self, node: ast.AST, scopes: list[ast.AST], statement: ast.stmt | None) -> Iterator[Site]:
        for child in _behavior(node):
            inner = child if isinstance(child, ast.stmt) else statement
            if inner is not None:
                for operator, target, text in _mutations(child, scopes):
                    yield self._site(operator, target, text, scopes, inner)
            yield from self._visit(child, [*scopes, child] if isinstance(child, SCOPES) else scopes, inner)

    def _site(self, operator: str, node: ast.AST, text: str, scopes: list[ast.AST], statement: ast.stmt) -> Site:
        start = self.offsets[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self.offsets[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        first, last = self.offsets[node.lineno - 1], self.offsets[node.end_lineno]  # type: ignore[attr-defined]
        after = self.source[first:start] + text.encode() + self.source[end:last]
        lost = "\n" * self.source[start:end].count(b"\n")  # keeps the numbers of the lines below
        padded = text + lost if isinstance(node, ast.stmt) else f"({text}{lost})" if lost else text
        names = [scope.name for scope in scopes if isinstance(scope, SCOPES)]
        return Site(
            path=self.path,
            where=".".join(names) or "<module>",
            line=node.lineno,  # type: ignore[attr-defined]
            lines=_executed_lines(statement, node),
            in_function=any(not isinstance(scope, ast.ClassDef) for scope in scopes),
            operator=operator,
            start=start,
            end=end,
            text=padded,
            before=_one_line(self.source[first:last]),
            after=_one_line(after),
        )


def _one_line(source: bytes) -> str:
    return " ".join(source.decode().split())


def _executed_lines(statement: ast.stmt, node: ast.AST) -> tuple[int, int]:
    """The lines of a simple statement, of the head of a compound one, or of the body of a changed default."""
    body = getattr(statement, "body", None)
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return statement.body[0].lineno, statement.end_lineno or statement.lineno
    if isinstance(statement, ast.Try) or not body:
        return node.lineno, getattr(node, "end_lineno", None) or node.lineno  # type: ignore[attr-defined]
    return statement.lineno, max(statement.lineno, body[0].lineno - 1)


def _behavior(node: ast.AST) -> Iterator[ast.AST]:
    """The children that matter when the program runs."""
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert) or _is_silent(node):
        return
    if isinstance(node, ast.arguments):
        yield from _defaults(node)
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_comment", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_for_types(child) and not _is_tuning(child):
                yield child


def _defaults(node: ast.arguments) -> Iterator[ast.expr]:
    positional = [*node.posonlyargs, *node.args]
    pairs = [
        *zip(reversed(positional), reversed(node.defaults), strict=False),
        *zip(node.kwonlyargs, node.kw_defaults, strict=True),
    ]
    for argument, default in pairs:
        if default is not None and not TUNING.search(argument.arg):
            yield default


def _is_tuning(node: ast.AST) -> bool:
    """A keyword argument or an assignment of a number that only sets a time limit or a layout size."""
    match node:
        case ast.keyword(arg=str() as name, value=ast.Constant()):
            return bool(TUNING.search(name))
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant()) | ast.AnnAssign(target=ast.Name(id=name)):
            return bool(TUNING.search(name))
    return False


def _is_for_types(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    if isinstance(node, ast.Assign):  # `__all__`, aliases of types
        value, target = node.value, node.targets[0]
        is_alias = isinstance(value, ast.Subscript | ast.BinOp) and isinstance(target, ast.Name) and target.id.istitle()
        return is_alias or (isinstance(target, ast.Name) and target.id == "__all__")
    if isinstance(node, ast.Call):
        return _name(node.func) in TYPING
    return False


def _is_silent(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[0].lstrip("_") in SILENT


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _mutations(node: ast.AST, scopes: list[ast.AST]) -> Iterator[tuple[str, ast.AST, str]]:
    """Operator, node to replace and its new text, for each mutation of `node` itself."""
    if isinstance(node, ast.stmt):
        yield from _of_statement(node, scopes)
    elif isinstance(node, ast.expr):
        for operator, changed in _of_expression(node):
            yield operator, node, f"({ast.unparse(changed)})"
    elif isinstance(node, ast.comprehension):
        for condition in node.ifs:
            yield "no condition", condition, "True"


def _of_expression(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Compare(ops=ops):
            for index, found in enumerate(ops):
                changed = copy.deepcopy(node)
                changed.ops[index] = COMPARISONS[type(found)]()
                yield "comparison", changed
        case ast.BoolOp(op=op):
            changed = copy.deepcopy(node)
            changed.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "and/or", changed
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "unary", operand
        case ast.BinOp(op=ast.Div()) if PATHS.search(ast.unparse(node)):
            return
        case ast.BinOp(op=op, left=left, right=right) if type(op) in ARITHMETIC:
            if not any(isinstance(side, ast.Constant | ast.JoinedStr | ast.List | ast.Dict | ast.Tuple)
                       and not (isinstance(side, ast.Constant) and isinstance(side.value, int | float))
                       for side in (left, right)):  # fmt: skip
                yield "arithmetic", ast.BinOp(left, ARITHMETIC[type(op)](), right)
        case ast.Constant(value=bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield "constant", ast.Constant(value + 1)
            yield "constant", ast.Constant(value - 1)
        case ast.Constant(value=float() as value):
            yield "constant", ast.Constant(value * 2 or 1.0)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "swapped branches", ast.IfExp(test, orelse, body)
        case ast.Call(func=function, args=args, keywords=keywords):
            if (name := _name(function)) in CALLS and isinstance(function, ast.Name | ast.Attribute):
                changed = copy.deepcopy(node)
                if isinstance(changed.func, ast.Attribute):
                    changed.func.attr = CALLS[name]
                else:
                    changed.func = ast.Name(CALLS[name])
                if name != "sorted" or not keywords:
                    yield "function", changed
            for index, keyword in enumerate(keywords):
                is_text = isinstance(keyword.value, ast.JoinedStr) or isinstance(
                    getattr(keyword.value, "value", None), str
                )
                if keyword.arg is not None and not is_text and not TUNING.search(keyword.arg):
                    yield "no keyword", ast.Call(function, args, keywords[:index] + keywords[index + 1 :])


def _of_statement(node: ast.stmt, scopes: list[ast.AST]) -> Iterator[tuple[str, ast.AST, str]]:
    match node:
        case ast.If(test=test):
            yield "negated if", test, f"(not ({ast.unparse(test)}))"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return None", value, "None"
        case ast.Expr(value=ast.Call() | ast.Await()) if not _is_silent(node):
            yield "deleted call", node, "pass"
        case ast.AugAssign():
            if type(node.op) in ARITHMETIC:
                changed = ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value)
                yield "arithmetic", node, ast.unparse(changed)
            yield "deleted assignment", node, "pass"
        case ast.Assign(targets=[target]) if scopes and _is_kept(target, scopes[-1]):
            yield "deleted assignment", node, "pass"
        case ast.Raise(exc=ast.expr()):
            yield "error swallowed", node, "pass"
        case ast.Continue():
            yield "loop control", node, "break"
        case ast.Break():
            yield "loop control", node, "continue"
        case ast.Try(handlers=handlers):
            for handler in handlers:
                if not isinstance(handler.body[-1], ast.Raise):
                    yield "handler raises", handler.body[0], "raise"


def _is_kept(target: ast.expr, scope: ast.AST) -> bool:
    """Whether deleting an assignment leaves a value there: an attribute, an item, or a name assigned elsewhere too."""
    if isinstance(target, ast.Attribute | ast.Subscript):
        return True
    stores = [n for n in ast.walk(scope) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return isinstance(target, ast.Name) and sum(n.id == target.id for n in stores) > 1
