"""What stands in docstrings, as far as a program can tell: that they are there, are sentences, and name what is raised.

Of kernels, protocols and layers every public function has one. A method that carries out what a documented interface
says (``forward_protocol`` of a layer, ``truncate_deal`` of a set of kernels) may leave it to the interface.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
ALONE: Final = "standalone_verify.py"  # read as a whole, so it is short
SOURCES: Final = {
    p: ast.parse(p.read_text())
    for package in ("uvcc_engine", "uvcc_console")
    for p in sorted((ROOT / package).rglob("*.py"))
    if p.name != ALONE
}
COMPUTING: Final = ("mpc", "model", "nsa", "proofs", "sharding")
INTERFACES: Final = (ROOT / "uvcc_engine/plane/api.py",)
AWAY: Final = re.compile(
    r"\bDESIGN (section|§)|DESIGN\.md|\bissue #?\d|\bseed documents?\b|\bTODO\b|\bFIXME\b|\bXXX\b|\bmilestone\b"
    r"|\bsieves?\b|\bforetell|\bheeds?\b|\bwhereabouts\b|\bpile of\b|\bsuccession\b",
    re.IGNORECASE,
)
"""Documents that are not here, work that is not done, and words of our own for what the field has a word for."""
ENDS: Final = (".", ":", "?", "!", "```", '"', ")")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _computing(path: Path) -> bool:
    return path.relative_to(ROOT).parts[1] in COMPUTING and path.relative_to(ROOT).parts[0] == "uvcc_engine"


def _documented(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, docstring) of a module, its classes and its functions."""
    yield "module", ast.get_docstring(tree) or ""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | Function) and (text := ast.get_docstring(node)):
            yield node.name, text


def _public(tree: ast.Module) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """(qualified name, definition) of whatever another module may use."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
            yield node.name, node
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, Function) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner


def _raised(node: ast.AST) -> set[str]:
    """Names of the errors that a function itself raises."""
    raised = (x.exc for x in ast.walk(node) if isinstance(x, ast.Raise) and x.exc is not None)
    names = {ast.unparse(x.func if isinstance(x, ast.Call) else x).rpartition(".")[2] for x in raised}
    return {n for n in names if n.endswith("Error")}


def test_every_module_says_what_it_is() -> None:
    assert [_name(p) for p, tree in SOURCES.items() if not ast.get_docstring(tree)] == []


def test_every_public_class_says_what_it_is_or_is_an_error() -> None:
    rooms = [p for p in SOURCES if _computing(p) or _name(p).startswith(("uvcc_engine/contract", "uvcc_console/core"))]
    bare = [
        f"{_name(p)}:{n}"
        for p in rooms
        for n, node in _public(SOURCES[p])
        if isinstance(node, ast.ClassDef) and not ast.get_docstring(node)
    ]
    assert bare == []


def test_every_public_function_that_computes_has_a_docstring() -> None:
    trees = {p: t for p, t in SOURCES.items() if _computing(p) or p in INTERFACES}
    said = {q.rpartition(".")[2] for t in trees.values() for q, n in _public(t) if "." in q and ast.get_docstring(n)}
    bare = [
        f"{_name(p)}:{q}"
        for p, tree in trees.items()
        for q, node in _public(tree)
        if not ast.get_docstring(node) and not ("." in q and node.name in said)
    ]
    assert bare == []


def test_what_computes_names_the_errors_that_it_raises() -> None:
    silent = [
        f"{_name(p)}:{q} {error}"
        for p, tree in SOURCES.items()
        if _computing(p)
        for q, node in _public(tree)
        if isinstance(node, Function)
        for error in _raised(node)
        if error not in (ast.get_docstring(node) or "")
    ]
    assert silent == []


def test_docstrings_are_sentences() -> None:
    odd = []
    for path, tree in SOURCES.items():
        for name, text in _documented(tree):
            first = text.split("\n\n")[0].strip()
            if not first.endswith(ENDS) or not text.rstrip().endswith((*ENDS, "``", "`")):
                odd.append(f"{_name(path)}:{name}: {first[-60:]}")
    assert odd == []


def test_docstrings_refer_to_nothing_that_is_not_here() -> None:
    found = [
        f"{_name(path)}:{name}: {match[0]}"
        for path, tree in SOURCES.items()
        for name, text in _documented(tree)
        if (match := AWAY.search(re.sub("``[^`]*``", "", text)))
    ]
    assert found == []


TENSORS: Final = re.compile(r"\b(Tensor|Share|PairBits|BoolShare|ndarray)\b")
SHAPE: Final = re.compile(
    r"\[[^\]]*\]|\(\w[^()]*, [^()]*\)|[Ss]hape|[Ss]calar|\b(?:one|each|an?) (?:element|entry|number)\b"
    r"|\belement by element|\bper (?:element|row|bit|output|entry)|\bone per\b|\brows?\b|\bcolumns?\b|\bvectors?\b"
    r"|\blast axis\b|\baxes\b|\bmatri(?:x|ces)\b|\blengths?\b|\bflat\b"
)
"""How a shape is said: its axes in brackets, whose shape it is, or over what a function goes."""
ELSEWHERE: Final = re.compile(
    r"``\w+_protocol``, run|[Ss]ee (?::\w+:)?``?\w|``\w+_protocol``|(?:inverse|transpose) of :func:"
)
"""A function that says of which other one its shapes are."""


def test_every_public_function_that_computes_on_tensors_says_their_shape() -> None:
    silent = [
        f"{_name(p)}:{node.name}"
        for p, tree in SOURCES.items()
        if _computing(p)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if TENSORS.search(" ".join(ast.unparse(a.annotation) for a in node.args.args if a.annotation) + _returned(node))
        if not SHAPE.search(text := ast.get_docstring(node) or "") and not ELSEWHERE.search(text)
    ]
    assert silent == []


def _returned(node: ast.FunctionDef) -> str:
    return f" {ast.unparse(node.returns)}" if node.returns is not None else ""
