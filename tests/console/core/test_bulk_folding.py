"""Folding many events at once gives what folding them one by one gives, and reading rows quickly what reading gives."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uvcc_console.core import events as ev
from uvcc_console.core.folding.bulk_folding import Folding, stands_apart
from uvcc_console.core.folding.reducing import changed
from uvcc_console.core.folding.reported_state import AGREEMENT_KEEP
from uvcc_console.core.folding.state import reduce
from uvcc_console.core.journal import journal
from uvcc_console.core.journal.journal import Journal, iter_events, read_all
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.report import recording

RECORDED: Final = Path(__file__).parents[1] / "ui" / "recorded"
COORDS = st.sampled_from(["p0r0s0t0", "p1r0s0t0", "p2r0s0t0"])
STEPS = st.integers(-1, 12)
RECORDS = st.fixed_dictionaries(
    {"step": STEPS | st.sampled_from(["x", None, 3.0, True]), "phase": st.sampled_from(["train", "load"])},
    optional={"ts": st.floats(0, 99), "mem_mib": st.integers(0, 9), "sent_bytes": st.integers(0, 99)},
)
EVENTS = st.one_of(
    st.builds(ev.HeartbeatRead, ts=st.floats(0, 99), pod=st.just("p0r0"), coord=COORDS, record=RECORDS),
    st.builds(
        ev.Metric,
        coord=COORDS,
        step=STEPS,
        values=st.dictionaries(st.sampled_from(["loss", "lr"]), st.floats(0, 9)),
        split=st.sampled_from(["train", "val"]),
    ),
    st.builds(
        ev.RootReported,
        coord=COORDS,
        epoch=st.integers(0, AGREEMENT_KEEP + 3),
        root=st.sampled_from("ab"),
        pairs=st.dictionaries(COORDS, st.sampled_from("xy"), max_size=2),
    ),
    st.builds(
        ev.LogLines,
        pod=st.just("p0r0"),
        src=st.sampled_from(["worker.log", "agent.log"]),
        lines=st.lists(st.sampled_from(["a", "b"]), max_size=3),
    ),
    st.builds(
        ev.EngineEvent,
        pod=st.just("p0r0"),
        level=st.just("info"),
        event=st.sampled_from(["plane_counters", "exit", "checkpoint_written", "watchdog_dump", "waiting", "new"]),
        fields=st.fixed_dictionaries(
            {"coord": COORDS, "peer": st.integers(0, 2), "began": st.just(1.0), "step": STEPS}
        ),
    ),
    st.builds(ev.CostTick, ts=st.floats(0, 99), hourly=st.just(1.0), spent=st.floats(0, 9)),
    st.builds(ev.CursorMoved, ts=st.floats(0, 99), pod=st.just("p0r0"), cursors=st.just({})),
    st.builds(ev.WorkerProcess, pod=st.just("p0r0"), coord=COORDS, state=st.sampled_from(["started", "exited"])),
    st.builds(ev.StageChanged, name=st.just("full"), status=st.sampled_from(["running", "ok"])),
    st.builds(
        ev.PhaseStarted, phase=st.just("full"), engine_run=st.sampled_from("ab"), steps=st.just(9), sid_job=st.just("")
    ),
)


def _one_by_one(events: list[ev.Event]) -> tuple[Snapshot, list[str]]:
    s, lines = Snapshot(), []
    for seq, event in enumerate(events, 1):
        before, s = s, reduce(s, event, seq)
        new = len(event.lines) if isinstance(event, ev.LogLines) else int(s.log is not before.log)
        lines += [entry.text for entry in s.log[len(s.log) - new :]]
    return s, lines


@given(st.lists(EVENTS, max_size=24), st.sets(st.integers(0, 24), max_size=4))
@settings(max_examples=40, deadline=None)
def test_it_is_what_folding_one_by_one_gives_and_no_state_that_was_seen_changes(
    events: list[ev.Event], seen: set[int]
) -> None:
    events = [
        ev.RunCreated(
            run="r", profile_name="", job_kind="private", replicas=1, pipeline_stages=1, tensor=1, stages=["full"]
        ),
        *events,
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UVCC_STRICT", "0")  # records that are no records are among them
        folding, looks, lines = Folding(Snapshot()), [], []
        for seq, event in enumerate(events, 1):
            lines += [entry.text for entry in folding.add(event, seq)]
            if seq in seen:
                looks.append((seq, folding.snapshot))
        whole, told = _one_by_one(events)
        assert folding.snapshot == whole
        assert list(folding.snapshot.workers) == list(whole.workers)
        assert [a.epoch for a in folding.snapshot.agreement] == [a.epoch for a in whole.agreement]
        assert lines == told
        for seq, snapshot in looks:
            assert snapshot == _one_by_one(events[:seq])[0], f"the state after event {seq} was changed later"


class _Open(Mapping[str, Any]):
    """What lies open while events are folded beside it: known to have an entry, and asked for nothing else."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError(f"{key} was asked for")

    def __contains__(self, key: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all of them were asked for")

    def __len__(self) -> int:
        raise AssertionError("their number was asked for")


@pytest.mark.parametrize("run", ["private", "lm"])
def test_what_is_folded_beside_asks_for_nothing_that_lies_open(run: str) -> None:
    """Over every event of a real run; a kind that comes to do more than it did has to leave the list."""
    s, seen = Snapshot(), set()
    with recording.played(RECORDED / run) as run_dir:
        events = [event for _, event in iter_events(run_dir / "journal.sqlite")]
    for event in events:
        if stands_apart(event, s):
            seen.add(event.kind)
            shut: Any = {name: _Open() for name in ("workers", "series", "agreement")}
            after, whole = reduce(changed(s, **shut, log=()), event), reduce(s, event)
            assert all(getattr(after, name) is shut[name] for name in shut), event
            assert after.agreed_epoch == whole.agreed_epoch
            assert after.log == whole.log[len(whole.log) - len(after.log) :]
        s = reduce(s, event)
    assert len(seen) >= 5, seen


def test_an_error_of_the_program_is_raised_where_tests_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UVCC_STRICT", "1")
    with pytest.raises(AttributeError):
        Folding(Snapshot()).add(ev.HeartbeatRead(pod="p", coord="p0", record=None), 1)  # type: ignore[arg-type]


ROWS: list[tuple[str, Any]] = [
    ("metric", {"coord": "c", "step": 3, "values": {"loss": 0.5}, "split": "train"}),
    ("metric", {"coord": "c", "step": 3, "values": {"loss": 1}, "split": "train"}),
    ("metric", {"coord": "c", "step": 3, "values": {"loss": "x"}, "split": "train"}),
    ("metric", {"coord": "c", "step": 3.0, "values": {}, "split": "train"}),
    ("metric", {"coord": "c", "step": True, "values": {}, "split": "train"}),
    ("metric", {"coord": "c", "step": 1 << 64, "values": {}, "split": "train"}),
    ("metric", {"coord": "c", "step": 3, "values": {}}),
    ("metric", {"coord": "c", "step": 3, "values": {}, "split": "train", "more": 1}),
    ("metric", {"coord": "c", "step": 3, "values": {}, "other": 1}),
    ("heartbeat", {"pod": "p", "coord": "c", "record": {"step": 1 << 70, "deep": [1, {"a": 1 << 70}]}}),
    ("heartbeat", {"pod": "p\u001b[2J", "coord": "c", "record": {"x\n": "\u202e"}}),
    ("root", {"coord": "c", "epoch": 1, "root": "r", "pairs": {"d": "x"}}),
    ("root", {"coord": "c", "epoch": 1, "root": "r", "pairs": {"d": 1}}),
    ("lines", {"pod": "p", "src": "s", "lines": ["a", 1]}),
    ("cursor", {"pod": "p", "cursors": {"f": [1, 2]}}),
    ("cursor", {"pod": "p", "cursors": {"f": [1, 2.5]}}),
    ("alert", {"name": "x", "level": "warn", "text": "t", "remedy": "r"}),
    ("telemetry", {"pod": "p", "cpu": 1, "mem_mib": 1.0, "disk_free_mib": 1.0, "gpus": [{"a": 1}]}),
    ("worker", {"pod": "p", "coord": "c", "state": "exited", "rc": None}),
    ("of a newer version", {"x": 1}),
]
TEXTS = [json.dumps(data) for _, data in ROWS] + [
    "",
    "{",
    "[]",
    '{"a":NaN}',
    '{"pod":"\\ud800"}',
    '{"a":1}x',
    '{"a":1,"a":2}',
]


def test_a_row_is_read_quickly_as_it_is_read_otherwise() -> None:
    quick = journal.quick_reader()
    for kind in {name for name, _ in ROWS}:
        for text in TEXTS:
            for data in (text.encode(), text.encode() + b"\xff"):
                slow = journal.event_of(kind.encode(), 1.0, data)
                assert repr(quick(kind.encode(), 1.0, data)) == repr(slow), (kind, data)
    assert quick(None, "x", 7) == journal.event_of(None, "x", 7)


def test_a_long_reading_loads_the_quick_parser_and_a_glance_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(journal, "quick_reader", lambda: asked.append(1) or journal.event_of)
    monkeypatch.setattr(journal, "MANY", 8)
    written = Journal(tmp_path / "j", source="t")
    for count, wanted in ((5, 0), (5, 1)):
        written.append(*(ev.Metric(coord="c", step=k, values={"loss": 0.5}) for k in range(count)))
        read_all(written)
        assert len(asked) == wanted
    written.close()


def test_most_rows_of_a_run_are_taken_whole() -> None:
    """Else a field of a new type would slow every long reading down, and nobody would see why."""
    from uvcc_console.core.events.event_base import form_of

    for event in (
        ev.HeartbeatRead(pod="p", coord="c", record={"step": 1, "loss": 0.5}),
        ev.Metric(coord="c", step=1, values={"loss": 0.5}),
        ev.RootReported(coord="c", epoch=1, root="r", pairs={"d": "x"}),
        ev.LogLines(pod="p", src="s", lines=["a"]),
        ev.CursorMoved(pod="p", cursors={"f": [1, 2]}),
        ev.EngineEvent(pod="p", level="info", event="e", fields={"a": 1}, at=1.5),
    ):
        form = form_of(event.kind)
        assert form is not None
        assert form.fits(ev.to_json(event)), event
