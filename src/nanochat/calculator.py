"""Calculator tool of nanochat models: arithmetic and letter counting, evaluated on a syntax tree."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

MAX_LENGTH = 200
MAX_VALUE = 1e15
_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def use_calculator(expression: str) -> str | None:
    """The value of `+ - * / ( )` over numbers (commas in them are dropped), or of `"text".count("x")`, as text.

    None for everything else, for values beyond 1e15 and for a division by zero.
    """
    if len(expression) > MAX_LENGTH:
        return None
    try:
        tree = ast.parse(_without_commas(expression).strip(), mode="eval").body
        value = _count(tree) if isinstance(tree, ast.Call) else _compute(tree)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return str(value)


def _without_commas(expression: str) -> str:
    return expression if '"' in expression or "'" in expression else expression.replace(",", "")


def _compute(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_compute(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_compute(node.left), _compute(node.right))
    else:
        raise ValueError("no arithmetic")
    assert isinstance(value, (int, float))
    if not abs(value) <= MAX_VALUE:
        raise ValueError("too large")
    return value


def _count(call: ast.Call) -> int:
    match call:
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str(text)), attr="count"),
            args=[ast.Constant(value=str(part))],
            keywords=[],
        ):
            return text.count(part)
    raise ValueError("no call of count")
