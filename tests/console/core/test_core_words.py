"""No surface shows a value as a program spells it."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

import uvcc_console
from uvcc_console.core import events as ev
from uvcc_console.core import pod_states
from uvcc_console.core.alerts.quality import differing
from uvcc_console.core.folding.state import fold
from uvcc_console.core.words import ACKS, PODS, engine_words, figure, value_words
from uvcc_engine.contract.run_files import narrate
from uvcc_engine.contract.run_files.event_names import NAMES

PYTHON = re.compile(r"\bTrue\b|\bFalse\b|\bNone\b|'")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["a", "bf16"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["k", "v"]), inner, max_size=2),
    max_leaves=6,
)


@given(VALUES)
def test_no_value_is_spelt_as_a_program_spells_it(value: Any) -> None:
    assert not PYTHON.search(value_words(value))
    assert not PYTHON.search(" ".join(engine_words("something_new", {"coord": "p0", "what": value})))
    settings = ev.SettingsChanged(changes={"ddp.shard": value, "runtime.compile": True}, by="ada")
    assert not PYTHON.search(fold([settings]).log[-1].text)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (True, "true"),
        (None, "null"),
        ([1, 2.5, False], "[1, 2.5, false]"),
        ({"op": "sum", "late": None}, "{op: sum, late: null}"),
        ("bf16", "bf16"),
    ],
)
def test_it_is_spelt_as_a_file_spells_it(value: Any, said: str) -> None:
    assert value_words(value) == said
    assert engine_words("something_new", {"what": value})[0] == f"something_new what={said}"
    assert differing({"x": value}, {"x": 7}) == [f"x is 7, planned {said}"]


# ---- every kind of event has words


def _told_by_the_console() -> set[str]:
    """The names of engine events that the console writes itself."""
    found: set[str] = set()
    for path in Path(uvcc_console.__file__).parent.rglob("*.py"):
        if "bench" in path.parts or "EngineEvent(" not in (text := path.read_text()):
            continue
        tree = ast.parse(text)
        called = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("EngineEvent")]
        given = {ast.unparse(k.value) for call in called for k in call.keywords if k.arg == "event"}
        named = {ast.unparse(target): value for target, value in _assigned(tree)}
        for text in given:
            part = named.get(text)
            literals = ast.walk(part) if part is not None else ast.walk(ast.parse(text))
            found |= {n.value for n in literals if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return found


def _assigned(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of each assignment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign) and node.value:
            yield node.target, node.value


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_engine_event_has_words(name: str) -> None:
    _has_words(name)


def test_every_event_that_the_console_tells_by_itself_has_words() -> None:
    told = _told_by_the_console()
    assert len(told) > 5
    for name in sorted(told):
        _has_words(name)


def _has_words(name: str) -> None:
    text, _ = engine_words(name, {})
    assert text != name
    assert "_" not in text.replace("job.patience", "")
    assert len(text) > 5


SILENT = {"cost", "cursor", "heartbeat", "metric", "root", "run_created", "telemetry"}
"""Kinds that change figures and tables, and say nothing in the log."""


def _example(kind: type[ev.Event]) -> ev.Event:
    plain: dict[str, Any] = {"str": "x", "int": 1, "float": 1.0, "bool": True}
    hints = {f.name: get_type_hints(kind)[f.name] for f in dataclasses.fields(kind) if f.name != "ts"}
    values = {name: plain.get(getattr(hint, "__name__", "")) for name, hint in hints.items()}
    empty = {name: [] if "list" in str(hint) else {} if "dict" in str(hint) else None for name, hint in hints.items()}
    told = {name: value if value is not None else empty[name] for name, value in values.items()}
    if kind is ev.WorkerProcess:
        told["state"] = "exited"
    if kind is ev.LogLines:
        told["lines"] = ["x"]
    if kind in (ev.HaltAck, ev.HaltDone):
        told |= {"nonce": "n", "gpu": ""} if kind is ev.HaltAck else {"nonce": "n"}
    return kind(**told)


def test_every_kind_of_event_of_the_journal_has_words_or_is_known_to_say_nothing() -> None:
    pod = ev.PodChanged(pod="x", party=0, replica=0, provider="local", state="agent")
    before = fold([pod, ev.HaltRequested(nonce="n", mode="halt", by="x"), _example(ev.Forecast)])
    silent = set()
    for name, kind in ev.kinds().items():
        after = fold([_example(kind)], before)
        if after.log is before.log:
            silent.add(name)
            continue
        said = after.log[-1].text
        assert name in ("lines", "engine") or (len(said.split()) > 1 and "_" not in said.replace("sid_job", "")), (
            name,
            said,
        )
    assert silent == SILENT


def test_every_state_of_a_pod_and_of_a_halt_has_words() -> None:
    assert set(PODS) == set(pod_states.STATES)
    for state in pod_states.STATES:
        event = ev.PodChanged(pod="p0r0", party=0, replica=0, provider="local", state=state)
        assert len(fold([event]).log[-1].text.split()) > 1
    assert set(ACKS) == {"unknown", "sent", "seen", "held", "released", "halted", "gone"}


def test_what_only_a_workers_log_says_is_told_in_words_too() -> None:
    log = "worker_p1r0s0t0.log"
    lines = [
        narrate.line(5.0, "worker_start", "info", {"coord": "p1r0s0t0", "run": "demo-1.full", "pid": 7}),
        narrate.line(5.0, "policy_accepted", "info", {"policy_hash": "ab" * 32, "note": "two words"}),
        "2026-11-25T07:25:10.401Z info something_else a=1",
        "Traceback (most recent call last):",
    ]
    start, accepted, *plain = fold([ev.LogLines(ts=9.0, pod="p1r0", src=log, lines=lines)]).log
    assert (start.level, start.source, start.text) == ("info", "p1r0", "worker process started")
    assert start.detail == "coord=p1r0s0t0 pid=7"
    assert accepted.text == "the signed policy is accepted"
    assert accepted.detail.startswith("policy_hash=abababababab")
    assert [(e.level, e.source, e.text) for e in plain] == [("debug", f"p1r0/{log}", line) for line in lines[2:]]
    assert fold([ev.LogLines(pod="p1r0", src="stdout.log", lines=lines[:1])]).log[0].text == lines[0]


def test_a_relay_is_told_by_its_address_and_not_by_the_fields_of_its_record() -> None:
    fields = {"phase": "full", "replica": 0, "kind": "relay", "relay_host": "127.0.0.1", "address_kind": "loopback"}
    shown = {**fields, "tls": False, "relay_url_local": "http://127.0.0.1:40079"}
    assert engine_words("privacy_relay_started", shown) == ("relay started for full at http://127.0.0.1:40079", "")
    public = {**fields, "replica": 1, "tls": True, "relay_url_public": "https://relay.example"}
    said = "relay started for full replica 1 at https://relay.example"
    assert engine_words("privacy_relay_started", public) == (said, "")


def test_a_path_that_ends_with_its_pod_is_no_warning() -> None:
    def level(state: str) -> str:
        pod = ev.PodChanged(pod="p0r0", party=0, replica=0, provider="x", state=state)
        down = ev.LinkChanged(pod="p0r0", path="ssh", up=False, detail="closed by the console")
        return fold([pod, down]).log[-1].level

    assert {state: level(state) for state in ("agent", "lost", "deleting", "gone")} == {
        "agent": "warn",
        "lost": "warn",
        "deleting": "info",
        "gone": "info",
    }


def test_a_measured_figure_has_no_power_of_ten_that_a_reader_must_count() -> None:
    assert [figure(v) for v in (0.000123456, 1.0454, 0.0, 99.96, 4734.2, -250.0)] == [
        "0.000123",
        "1.05",
        "0",
        "100",
        "4734",
        "-250",
    ]
