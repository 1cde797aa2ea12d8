"""What stands in docstrings, as far as a program can tell: that they are there, are sentences, and name what is raised.

Of kernels, protocols and layers every public function has one. A method that carries out what a documented interface
says (``forward_protocol`` of a layer, ``truncate_deal`` of a set of kernels) may leave it to the interface.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, TypeGuard

from parsed import ROOT, SOURCES, nodes_of, tree_of

COMPUTING: Final = ("mpc", "model", "nsa", "proofs", "sharding")
ARRAYS: Final = (("uvcc_engine", "parallel"), ("uvcc_engine", "plane"), ("uvcc_engine", "data"))
"""Rooms that compute little, but take and give tensors."""
INTERFACES: Final = (ROOT / "uvcc_engine/plane/api.py",)
AWAY: Final = re.compile(
    r"\bDESIGN (section|§)|DESIGN\.md|\bissue #?\d|\bseed documents?\b|\bTODO\b|\bFIXME\b|\bXXX\b|\bmilestone\b"
    r"|\bsieves?\b|\bforetell|\bheeds?\b|\bwhereabouts\b|\bcures?\b|\bremed(?:y|ies)\b|\bpile of\b|\bsuccession\b",
    re.IGNORECASE,
)
"""Documents that are not here, work that is not done, and words of our own for what the field has a word for."""
ENDS: Final = (".", ":", "?", "!", "```", '"', ")")
SAME: Final = re.compile(r"^See ``")
"""A method that does what the docstring of another one says, which names the errors."""
WITHIN: Final = {"health": "ValueError of a reply that is none: caught there, and told as UnreachableError"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def _sources() -> dict[Path, ast.Module]:
    """All but the verifier that is one file: it is read as a whole, so what it says is short."""
    return {p: tree_of(p) for p in SOURCES}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _computing(path: Path) -> bool:
    return path.relative_to(ROOT).parts[1] in COMPUTING and path.relative_to(ROOT).parts[0] == "uvcc_engine"


@cache
def _documented(path: Path) -> tuple[tuple[str, str], ...]:
    """(name, docstring) of a file, its classes and its functions."""
    return tuple(_told(path))


def _told(path: Path) -> Iterator[tuple[str, str]]:
    yield "module", ast.get_docstring(tree_of(path)) or ""
    for node in nodes_of(path):
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
    found = {n for n in names if n.endswith("Error")}
    return {"OSError" if issubclass(getattr(builtins, n, Exception), OSError) else n for n in found}


def test_every_module_says_what_it_is() -> None:
    assert [_name(p) for p, tree in _sources().items() if not ast.get_docstring(tree)] == []


def test_every_public_class_says_what_it_is_or_is_an_error() -> None:
    rooms = [
        p for p in _sources() if _computing(p) or _name(p).startswith(("uvcc_engine/contract", "uvcc_console/core"))
    ]
    bare = [
        f"{_name(p)}:{n}"
        for p in rooms
        for n, node in _public(_sources()[p])
        if isinstance(node, ast.ClassDef) and not ast.get_docstring(node)
    ]
    assert bare == []


def test_every_public_function_that_computes_has_a_docstring() -> None:
    trees = {p: t for p, t in _sources().items() if _computing(p) or p in INTERFACES}
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
        for p, tree in _sources().items()
        if _computing(p) or p.relative_to(ROOT).parts[:2] in ARRAYS
        for q, node in _public(tree)
        if isinstance(node, Function)
        for error in _raised(node)
        if error not in (text := ast.get_docstring(node) or "") and not SAME.search(text) and q not in WITHIN
    ]
    assert silent == []


def test_docstrings_are_sentences() -> None:
    odd = []
    for path in SOURCES:
        for name, text in _documented(path):
            first = text.split("\n\n")[0].strip()
            if not first.endswith(ENDS) or not text.rstrip().endswith((*ENDS, "``", "`")):
                odd.append(f"{_name(path)}:{name}: {first[-60:]}")
    assert odd == []


def test_docstrings_refer_to_nothing_that_is_not_here() -> None:
    found = [
        f"{_name(path)}:{name}: {match[0]}"
        for path in SOURCES
        for name, text in _documented(path)
        if AWAY.search(text)  # most have nothing of the kind, quoted or not
        if (match := AWAY.search(re.sub("``[^`]*``", "", text)))
    ]
    assert found == []


TENSORS: Final = re.compile(r"\b(Tensor|Share|PairBits|BoolShare|ndarray|NDArray|Floats|Ints|Labels|RowMask)\b")
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
    """A method may leave it to its class, or to the interface that it carries out."""
    said: set[str] = set()
    silent: list[tuple[str, str]] = []
    for path, tree in _sources().items():
        if not (_computing(path) or path.relative_to(ROOT).parts[:2] in ARRAYS):
            continue
        classes = {n.name: ast.get_docstring(n) or "" for n in tree.body if isinstance(n, ast.ClassDef)}
        for q, node in _public(tree):
            taken = (ast.unparse(a.annotation) for a in node.args.args if a.annotation) if _is_function(node) else ()
            if not _is_function(node) or not TENSORS.search(" ".join(taken) + _returned(node)):
                continue
            owner, _, method = q.rpartition(".")
            text = f"{ast.get_docstring(node) or ''} {classes.get(owner, '')}"
            if SHAPE.search(text) or ELSEWHERE.search(text):
                said.update([method] if owner else ())
            else:
                silent.append((f"{_name(path)}:{q}", method if owner else ""))
    assert [where for where, method in silent if method not in said] == []


def _is_function(node: ast.AST) -> TypeGuard[Function]:
    return isinstance(node, Function)


def _returned(node: Function) -> str:
    return f" {ast.unparse(node.returns)}" if node.returns is not None else ""


TIMES: Final = re.compile(
    r"timeout|deadline|wait|ttl|lease|delay|pause|patience|age|since|until|interval|period|duration|stay|elapsed"
    r"|window|quiet|expires|begun|began|started|ended|created|remaining|overdue|due"
)
SIZES: Final = re.compile(r"size|capacity|limit|most|room|memory|length|budget|quota|total|offset|largest|usage|volume")
SPANS: Final = re.compile(
    r"\b(?:seconds?|minutes?|hours?|days?|milliseconds?|time stamps?|steps?|sequence numbers?)\b", re.IGNORECASE
)
UNITS: Final = re.compile(
    r"\b(?:bytes?|[KMG]iB|characters?|elements?|entry|entries|rows?|columns?|cells?|tokens?|digits?|bits?|lines?|leaf|leaves"
    r"|members?|parties|steps?|messages?|records?|events?|items?|samples?|values?|numbers?|ranks?|connections?|frames?"
    r"|blocks?|points?|names?|sections?|pods?|images?|dollars?|US|files?|runs?|parts?|norms?)\b",
    re.IGNORECASE,
)
"""What a number of time or size may count. One that is named after its unit (``_s``, ``_bytes``) needs no words."""


def _counted(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation) in ("int", "float", "int | None", "float | None")


def _unclear(node: Function) -> Iterator[str]:
    """Parameters of time or size of a function, and its result if that is one, whose names carry no unit."""
    for a in (*node.args.args, *node.args.kwonlyargs):
        if _counted(a.annotation) and (TIMES.fullmatch(a.arg) or SIZES.fullmatch(a.arg)):
            yield a.arg
    if _counted(node.returns) and (TIMES.fullmatch(node.name) or SIZES.fullmatch(node.name)):
        yield node.name


def test_what_counts_time_or_size_says_in_what() -> None:
    """In its name, its docstring, its class's, or the docstring of the method that it carries out."""
    said: set[tuple[str, str]] = set()
    silent: list[tuple[str, str, str]] = []
    for path, tree in _sources().items():
        classes = {n.name: ast.get_docstring(n) or "" for n in tree.body if isinstance(n, ast.ClassDef)}
        for q, node in _public(tree):
            if not isinstance(node, Function):
                continue
            owner, _, method = q.rpartition(".")
            text = f"{ast.get_docstring(node) or ''} {classes.get(owner, '')}"
            for name in _unclear(node):
                if (SPANS if TIMES.fullmatch(name) else UNITS).search(text):
                    said.add((method, name))
                else:
                    silent.append((f"{_name(path)}:{q} {name}", method, name))
    assert [where for where, method, name in silent if (method, name) not in said] == []
