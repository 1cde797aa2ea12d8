"""Every alert, exit code, halt outcome and gate that the code knows, and the index that leads from each to its page."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from docs.make.words import HEAD

ROOT: Final = Path(__file__).parents[2]
RUNBOOKS: Final = ROOT / "docs" / "runbooks"
CODES: Final = {
    "0": "done, and verified where there is something to verify",
    "1": "it failed, or does not hold",
    "2": "wrong usage, or unreadable input",
    "3": "the engine: a party broke the protocol; verify: identities not pinned; pods: nobody can tell yet",
    "4": "the engine: a party gave no sign of life; verify: transcripts are missing",
    "5": "the engine: out of reach; verify: the full phase is missing",
    "6": "verify: no manifest by a known collector",
    "70": "a worker ended by an error that nobody expected",
    "130": "interrupted",
}
"""Every exit code of both commands and of workers. ``codes_in_code`` finds them in the sources."""


class Place(NamedTuple):
    """Where an alert is raised, and how grave it is there."""

    level: str
    where: str


def _constants(tree: ast.Module) -> dict[str, str]:
    found = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            found[target.id] = value.value
    return found


@cache
def alerts() -> dict[str, list[Place]]:
    """Every alert by its name. Raises LookupError for a call whose name cannot be read in the source."""
    found: defaultdict[str, list[Place]] = defaultdict(list)
    texts = {p: p.read_text(encoding="utf-8") for p in sorted((ROOT / "uvcc_console").rglob("*.py"))}
    trees = {p: ast.parse(text) for p, text in texts.items() if re.search(r"Alert\(|Finding\(|_alert\(", text)}
    everywhere = {name: value for tree in trees.values() for name, value in _constants(tree).items()}
    for path, tree in trees.items():
        known = everywhere | _constants(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func).rpartition(".")[2]
            given = {k.arg: k.value for k in node.keywords}
            if called == "Alert" and "name" in given:
                name, level = given["name"], given.get("level")
            elif called == "Finding" and node.args:
                name, level = node.args[0], given.get("level", node.args[4] if len(node.args) > 4 else None)
            elif called == "_alert" and len(node.args) > 1:
                level, name = node.args[0], node.args[1]
            else:
                continue
            text = _text(name, known)
            if not text:
                if ast.unparse(name) in ("f.name", "name"):  # what another call here has named
                    continue
                raise LookupError(f"{path.name}:{node.lineno}: the alert's name is no constant")
            grave = _text(level, known) if level is not None else "warn" if called == "Finding" else ""
            found[text].append(Place(grave or "warn or error", path.relative_to(ROOT).as_posix()))
    return dict(sorted(found.items()))


def _text(node: ast.expr | None, known: dict[str, str]) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return known.get(node.id, "") if isinstance(node, ast.Name) else ""


def gates() -> list[str]:
    """Every gate, as ``measure`` names it in the journal."""
    tree = ast.parse((ROOT / "uvcc_console/rollout/stages/verify/verification.py").read_text(encoding="utf-8"))
    named = [
        k.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("GateMeasured")
        for k in node.keywords
        if k.arg == "name" and isinstance(k.value, ast.Constant)
    ]
    from uvcc_console.plan.schema import GatesPart

    return sorted({str(n) for n in named} | set(GatesPart.model_fields))


def halt_words() -> set[str]:
    """What a halt can end in, as the code has it: its alerts, what a worker's end can lack, its rungs, its mark."""
    from uvcc_console.core import rungs
    from uvcc_engine.contract.agent_protocol.wire import Lacks

    told = {n for n, places in alerts().items() if any(p.where == "uvcc_console/halt/machine.py" for p in places)}
    steps = {str(v) for name, v in vars(rungs).items() if name.isupper() and isinstance(v, str)}
    return told | {one.value for one in Lacks if one.value} | steps | {"UNKNOWN", "gpu"}


def codes_in_code() -> set[str]:
    """Exit codes that the hierarchy of errors, both entry points and the verifier have."""
    from uvcc_console.cli import main
    from uvcc_console.cli.steer import pods
    from uvcc_engine.contract import errors
    from uvcc_engine.transcript.proof import package

    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.UvccError)]
    found = {c.exit_code for c in classes} | set(package.CODES.values()) | {pods.UNKNOWN}
    return {str(c) for c in found | {main.OK, main.FAILED, main.USAGE, main.INTERRUPTED}}


def headings(page: str) -> list[str]:
    """The names of a runbook's sections: what stands in its headings of the second level."""
    text = (RUNBOOKS / page).read_text(encoding="utf-8")
    return [m[1].strip("`") for m in re.finditer(r"^## (.+?)\s*$", text, re.MULTILINE)]


def anchor(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-")


def _rows() -> Iterator[str]:
    yield from ("## Alerts", "", "| alert | level |", "|---|---|")
    for name, places in alerts().items():
        levels = ", ".join(sorted({p.level for p in places}))
        yield f"| [`{name}`](alerts.md#{anchor(name)}) | {levels} |"
    yield from ("", "## Exit codes", "", "| code | means |", "|---|---|")
    for code, means in CODES.items():
        yield f"| [`{code}`](exit-codes.md#{anchor(code)}) | {means} |"
    yield from ("", "## How a halt can end", "", "| outcome |", "|---|")
    for name in headings("halts.md"):
        yield f"| [{name}](halts.md#{anchor(name)}) |"
    yield from ("", "## Gates", "", "| gate |", "|---|")
    for name in gates():
        yield f"| [`{name}`](gates.md#{anchor(name)}) |"
    yield ""


def index() -> str:
    """The index of all runbooks."""
    lines = [
        "# Runbooks",
        "",
        HEAD,
        "",
        "You are woken at three in the morning. Find the word that the console shows, and go where it leads. Every",
        "section says what you see, what it means, the one next key or command, how you see that it worked, and what",
        "it costs. Whole procedures: [smoke, then full, on a market](market.md), [triage of a hung language",
        "model](triage.md), [spending and tear-down](spend.md), [disasters](disasters.md). Words are those of the",
        "[glossary](../glossary.md).",
        "",
        *_rows(),
    ]
    return "\n".join(lines).rstrip() + "\n"
