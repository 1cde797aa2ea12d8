"""Nothing is decided by the words of a message: texts are for people, codes and types decide.

A decision is a comparison with, a search in, or a cut of a text that says what happened. Where somebody else's program
gives nothing but words, one function reads them at the border; each such function is listed here with its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Final

from parsed import EVERY_SOURCE, ROOT, nodes_of

MESSAGES: Final = frozenset({"what", "hint", "detail", "why", "reason", "said", "trouble", "finding"})
CUTS: Final = frozenset(
    {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split", "find", "index"}
)
TEXTS: Final = frozenset({"text", "low", "lowered", "err", "stderr", "output", "line", "reply"})
"""Variables that often hold somebody's words: only a search for words of ours in them counts."""
ERRORS: Final = frozenset({"e", "error", "exc", "exception"})
BORDERS: Final[dict[str, str]] = {
    "uvcc_console/fleet/bootstrap.py:_start_agent": "takes a word off another program's complaint, and shows the rest",
    "uvcc_console/ui/widgets/bars.py:banner_lines": "does not say HALTED twice in one line",
    "uvcc_console/fleet/cloud/calls.py:kind_of": "a market refuses with prose, and has no code for what it refuses",
    "uvcc_console/fleet/vendors/slurm.py:_kind": "Slurm's commands complain in prose",
    "uvcc_console/fleet/vendors/kubernetes.py:_kind": "a quota and a webhook's no are both Forbidden in its API",
    "uvcc_console/ui/screens/viewer.py:_role": "the colour of a line of Python's own stack dumps",
    "uvcc_console/report/redact.py:_without_public": "secrets are looked for in whatever text there is",
    "uvcc_console/report/secret_shapes.py:without_public": "secrets are looked for in whatever text there is",
    "uvcc_console/report/secret_shapes.py:measure": "secrets are looked for in whatever text there is",
    "uvcc_engine/train/worker.py:out_of_memory": "torch's CPU allocator raises a plain RuntimeError",
    "uvcc_engine/model/definition/torch_module.py:by_secret_data": "torch has no public type for what it cannot trace",
}


def _is_message(node: ast.expr) -> bool:
    """Whether an expression is a text for people: an error's words, or a variable named as one."""
    if isinstance(node, ast.Call):
        inner = node.func
        if isinstance(inner, ast.Attribute) and inner.attr in ("lower", "strip", "rstrip", "casefold"):
            return _is_message(inner.value)
        named = isinstance(inner, ast.Name) and inner.id in ("str", "repr") and len(node.args) == 1
        return named and isinstance(node.args[0], ast.Name) and node.args[0].id in ERRORS
    if isinstance(node, ast.Subscript):
        return _is_message(node.value)
    return (isinstance(node, ast.Attribute) and node.attr in MESSAGES) or (
        isinstance(node, ast.Name) and node.id in MESSAGES
    )


def _is_text(node: ast.expr) -> bool:
    """Whether an expression is one of ``TEXTS``, or an error's words."""
    return (isinstance(node, ast.Name) and node.id in TEXTS) or _is_message(node)


def _is_error_text(node: ast.expr) -> bool:
    """Whether an expression is such an attribute of a record or an error (``args`` are words of a command line)."""
    of_args = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args"
    return isinstance(node, ast.Attribute) and node.attr in MESSAGES and not of_args


def _is_words(node: ast.expr) -> bool:
    """Whether an expression is a text of this program that has a letter in it."""
    if isinstance(node, ast.Tuple):
        return any(_is_words(e) for e in node.elts)
    if isinstance(node, ast.JoinedStr):
        return True
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and any(c.isalpha() for c in node.value)


def _decides(node: ast.AST) -> bool:
    """Whether words seem to decide in this comparison or call."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, op, right = node.left, node.ops[0], node.comparators[0]
        among = isinstance(op, ast.In | ast.NotIn)
        searched = among and _is_words(left) and (_is_message(right) or _is_text(right))
        searched |= among and isinstance(left, ast.Name) and left.id == "word" and _is_text(right)
        return searched or (isinstance(op, ast.Eq | ast.NotEq) and _is_error_text(left) and _is_words(right))
    if isinstance(node, ast.Call) and isinstance(cut := node.func, ast.Attribute):
        return cut.attr in CUTS and bool(node.args) and _is_message(cut.value) and _is_words(node.args[0])
    return False


def _decisions(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, int]]:
    """(function, line) of every place where words seem to decide, of the nodes of a file."""
    if not any(map(_decides, nodes)):  # as in most
        return
    for outer in nodes:
        for node in ast.walk(outer) if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef) else ():
            if isinstance(node, ast.expr) and _decides(node):
                yield outer.name, node.lineno


def test_no_words_decide() -> None:
    found: dict[str, list[int]] = {}
    for path in EVERY_SOURCE:
        for function, line in _decisions(nodes_of(path)):
            found.setdefault(f"{path.relative_to(ROOT).as_posix()}:{function}", []).append(line)
    assert {place: lines for place, lines in found.items() if place not in BORDERS} == {}
    assert found.keys() >= BORDERS.keys()  # what is no longer needed is taken off the list


def test_the_scan_finds_what_it_is_for() -> None:
    bad = [
        "def f(e):\n    return 'refused' in str(e)",
        "def f(e):\n    return e.what.startswith('no worker')",
        "def f(said):\n    return said.lower().partition(' for ')[0]",
        "def f(s):\n    return s.detail == 'halted'",
        "def f(why):\n    return 'timeout' not in why",
        "def f(err):\n    low = err.lower()\n    return 'timed out' in low",
        "def f(text):\n    return any(word in text for word in WORDS)",
    ]
    assert all(list(_decisions([*ast.walk(ast.parse(text))])) for text in bad)
    good = ["def f(e):\n    return e.code == 'refused'", "def f(said):\n    return said == ''"]
    assert not any(list(_decisions([*ast.walk(ast.parse(text))])) for text in good)
