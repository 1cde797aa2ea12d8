"""What both sides of a border must agree on is written down once: file names, parties, canonical JSON."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_type_hints

from parsed import ROOT, SOURCES, nodes_of, text_of, tree_of

from uvcc_console.core import pod_states
from uvcc_console.plan.schema import PrivateJobSettings
from uvcc_engine.contract.job import link_spec, rollout_phases, topology
from uvcc_engine.contract.job.private_job import BOUNDS, CHOICES, PrivateJob
from uvcc_engine.contract.run_files import control, eventlog, files

FILES: Final = frozenset(
    {files.RUN_JSON, files.RUN_INFO, files.TRAINING, files.VAL, files.EVENTS, files.HALT, files.LINK, files.METRICS}
    | {files.CHECKPOINTS, files.exit_name(0)}
)
"""Names in a run directory. ``result.json`` is a file of every bundle as well (``transcript.leaves.leaf_file``)."""
KEYS: Final = {  # headings of a document and of a panel, not a folder
    "uvcc_console/report/handoff.py": {files.CHECKPOINTS},
    "uvcc_console/ui/panels/rollout.py": {files.CHECKPOINTS},
}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _literals(path: Path) -> Iterator[tuple[int, str]]:
    text = text_of(path)
    for node in nodes_of(path) if any(name in text for name in FILES) else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_names_in_a_run_directory_have_one_list() -> None:
    found = [
        f"{_name(path)}:{line} {text}"
        for path in SOURCES
        if _name(path) != "uvcc_engine/contract/run_files/files.py"
        for line, text in _literals(path)
        if text in FILES - KEYS.get(_name(path), set())
    ]
    assert found == []


A_FILE: Final = re.compile(r"[\w.*?-]+\.(?:json|jsonl|csv|log|sqlite|txt|yaml|box|npz|safetensors|pub|sock)")
QUOTED: Final = re.compile(rf'["}}]{A_FILE.pattern}["{{]')
"""A whole text, or what stands beside the fields of one."""
SEVERAL: Final[dict[str, str]] = {
    "MANIFEST.json": "a checkpoint's and a package's: two formats, each defined once",
    "config.json": "a relay's, and a language model's as its library names it",
    "model.safetensors": "an owner's opened weights, and a language model's as its library names it",
    "relay.json": "what whoever starts a relay calls its settings",
    "rows.csv": "a table made up for a story and for a benchmark",
    "_by_*.box": "the end of a pattern that each side begins with its own coordinates",
    "FILE.pub": "the word for a file in a usage line",
    "*.safetensors": "patterns of what may leave a pod, and of what a log does not quote",
}
"""Names in several files all the same, with the reason."""


def _docstrings(path: Path) -> set[int]:
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [n.body for n in nodes_of(path) if isinstance(n, holders) and n.body]
    return {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}


def test_a_file_that_two_modules_know_has_its_name_from_one() -> None:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        if not QUOTED.search(text_of(path)):
            continue
        docstrings = _docstrings(path)
        for node in nodes_of(path):
            named = isinstance(node, ast.Constant) and isinstance(node.value, str) and A_FILE.fullmatch(node.value)
            if named and id(node) not in docstrings:
                found[node.value].add(_name(path))
    twice = {name: sorted(places) for name, places in found.items() if len(places) > 1}
    assert {name: places for name, places in twice.items() if name not in SEVERAL} == {}
    assert SEVERAL.keys() <= twice.keys()


def test_yaml_is_read_in_one_place() -> None:
    """PyYAML's own loaders take the last of two equal keys in silence."""
    found = [
        f"{_name(path)}:{node.lineno}"
        for path in SOURCES
        if _name(path) != "uvcc_engine/contract/parsing/yaml_text.py"
        if "yaml" in text_of(path)
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node).startswith(("yaml.load", "yaml.safe_load", "yaml.full"))
    ]
    assert found == []


def test_the_number_of_parties_is_defined_once() -> None:
    found = []
    for path in SOURCES:
        for node in tree_of(path).body if "PARTIES" in text_of(path) else ():
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(t, ast.Name) and t.id == "PARTIES" for t in targets):
                found.append(_name(path))
    assert found == ["uvcc_engine/contract/job/topology.py"]


def test_json_that_must_read_the_same_everywhere_is_made_in_one_place() -> None:
    found = []
    for path in SOURCES:
        text = text_of(path)
        for node in nodes_of(path) if "sort_keys" in text or "rfc8785" in text else ():
            named = {k.arg for k in node.keywords} if isinstance(node, ast.Call) else set()
            dumped = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("json.dumps")
            if dumped and {"sort_keys", "separators"} <= named and "default" not in named:
                found.append(_name(path))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "rfc8785.dumps":
                found.append(_name(path))
    assert sorted(found) == ["uvcc_engine/contract/parsing/canonical.py"] * 2


def test_a_profile_asks_of_a_private_job_what_the_engine_asks() -> None:
    """Defaults, limits and choices are the engine's own: a profile's model refuses what the job refuses."""
    fields = PrivateJobSettings.model_fields
    own = {f.name: f for f in dataclasses.fields(PrivateJob)}
    for name, bounds in BOUNDS.items():
        limits = {type(c).__name__.lower(): getattr(c, type(c).__name__.lower()) for c in fields[name].metadata}
        assert limits == bounds.limits(), name
    hints = get_type_hints(PrivateJob)
    for name in CHOICES.keys() - {"rounds"}:
        assert fields[name].annotation == hints[name]
    same = fields.keys() & own.keys() - {"kind", "steps", "reveal", "rounds", "clients"}
    told = {n: fields[n].default for n in same}
    told |= {n: tuple(value) for n, value in told.items() if isinstance(value, list)}  # YAML has no tuples
    assert told == {n: own[n].default for n in same}
    assert same >= (BOUNDS.keys() | CHOICES.keys()) - {"steps", "rounds"}


def test_no_number_of_a_private_job_stands_in_a_second_place() -> None:
    """A profile's model holds no limit and no default of its own for a key of the private job."""
    tree = tree_of(ROOT / "uvcc_console/plan/schema.py")
    (settings,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "PrivateJobSettings"]
    told = [
        n for n in settings.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) in BOUNDS.keys() | CHOICES
    ]
    assert len(told) == len(BOUNDS) + len(CHOICES)
    numbers = [n.value for line in told for n in ast.walk(line) if isinstance(n, ast.Constant)]
    assert [n for n in numbers if isinstance(n, int | float)] == []


def test_the_modes_and_rungs_of_a_halt_have_one_list() -> None:
    found = []
    for path in SOURCES:
        for node in nodes_of(path) if '"hold"' in text_of(path) else ():
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                words = {e.value for e in node.elts if isinstance(e, ast.Constant)}
                if words == set(control.MODES) or words >= {"hold", "halt", "term", "kill"}:
                    found.append(_name(path))
    assert sorted(found) == ["uvcc_console/core/rungs.py", "uvcc_engine/contract/run_files/control.py"]


def test_words_are_compared_in_one_place() -> None:
    assert [_name(p) for p in SOURCES if "difflib" in text_of(p)] == ["uvcc_engine/contract/parsing/suggest.py"]


LISTS: Final = (
    ("uvcc_console/core/pod_states.py", pod_states.STATES, 2),
    ("uvcc_engine/contract/job/rollout_phases.py", rollout_phases.PHASES, 2),
    ("uvcc_engine/contract/job/topology.py", topology.AXES, 3),
    ("uvcc_engine/contract/run_files/files.py", files.VAL_COLUMNS, 3),
    ("uvcc_engine/contract/run_files/eventlog.py", eventlog.LEVELS, 4),
    ("uvcc_engine/contract/job/link_spec.py", link_spec.FAULT_KINDS, 3),
)
"""Lists of words, the module that has each, and from how many of its words on a literal is a second one."""


def test_a_list_of_words_that_decides_is_written_once() -> None:
    second = []
    for path in SOURCES:
        text = text_of(path)
        if not any(sum(f'"{word}"' in text for word in words) >= least for _, words, least in LISTS):
            continue
        for node in nodes_of(path):
            if not isinstance(node, ast.Tuple | ast.List | ast.Set):
                continue
            found = {e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)}
            for home, words, least in LISTS if len(found) == len(node.elts) else ():
                if _name(path) != home and len(found) >= least and found <= set(words):
                    second.append((_name(path), node.lineno, found))
    assert second == []
