"""Arbitrary messages through every reader: the channel's decoding, the decoder, the journal and the snapshot.

``UVCC_FUZZ_INPUTS=1000000`` (default 3,000) sets how many messages the seeded fuzz tries, ``UVCC_FUZZ_SEED`` where it
begins: a large number is split over runs by giving each another seed.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uvcc_console.core import alerts
from uvcc_console.core import events as ev
from uvcc_console.core.events.event_base import is_harmless
from uvcc_console.core.folding.state import fold, reduce
from uvcc_console.core.journal.journal import Journal, read_all
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet import agent_lines
from uvcc_console.halt.published_roots import Published
from uvcc_console.rollout.decoder import Decoder
from uvcc_engine.contract.agent_protocol.agent_messages import parse
from uvcc_engine.contract.peer_protocol import relay_words

INPUTS = int(os.environ.get("UVCC_FUZZ_INPUTS", "3000"))
SEED = int(os.environ.get("UVCC_FUZZ_SEED", "7"))
RUN, POD, COORD = "r.full", "p1r0", "p1r0s0t0"
SCALARS: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**53, 2**63, 10**25, 10**400, 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), float("-inf"), "", "x", "3", "12/100", "nan", "p1r0s0t0", "p0r0s0t0", "\x1b[31m"),
    *(
        "\u202e",
        "a\nb",
        "\ud800",
        "../../x",
        "full",
        RUN,
        "train",
        "halted",
        "ab" * 32,
        "checkpoint_written",
        "waiting",
    ),
]
KEYS = (
    *("step", "coord", "phase", "ts", "run", "fields", "event", "level", "epoch", "root", "pairs", "values", "rank"),
    *("loss", "mem_mib", "sent_bytes", "last_collective", "seq", "result_hash", "status", "peer", "since_s", "sha256"),
    *("config", "job", "parameters", "waiting_on", "halt_nonce", "gpus", "cpu", "disk_free_mib", "pid", "rc", "state"),
)
SOURCES = (
    *("heartbeat_rank0.jsonl", "events.jsonl", "training.csv", "val.csv", "result.json", "exit_rank1.json", "run.json"),
    *("worker_p1r0s0t0.log", "\x1b[2J", "x/../y", ""),
)
OPS = ("ack", "lines", "rewind", "dropped", "proc", "halted", "telemetry", "malformed", "of-tomorrow")
KINDS = sorted(ev.kinds())


def value(r: random.Random, depth: int = 3) -> Any:
    """Any JSON value, mostly of the words that readers look for."""
    if depth <= 0 or r.random() < 0.6:
        return r.choice(SCALARS)
    if r.random() < 0.3:
        return [value(r, depth - 1) for _ in range(r.randrange(4))]
    return {str(r.choice(KEYS)): value(r, depth - 1) for _ in range(r.randrange(6))}


def line(r: random.Random, src: str) -> Any:
    """One line as a file of this name might hold it, or not."""
    roll = r.random()
    if roll < 0.1:
        return value(r)
    if src.endswith(".csv") and roll < 0.9:
        cells = [
            str(r.choice(("step", "loss", "1", "2", "nan", "inf", "1e999", "", "x", "1_0", "7.5"))) for _ in range(5)
        ]
        return ",".join(cells)
    if roll < 0.15:
        return "[" * r.choice((5, 2000, 100_000))
    usual = {"run": RUN, "coord": COORD, "step": r.randrange(50), "event": r.choice(("epoch_root", "waiting", "x"))}
    if r.random() < 0.5:
        usual["fields"] = {"epoch": r.randrange(120), "root": "ab", "coord": COORD, **_object(r)}
    text = json.dumps(usual | _object(r))
    return text if r.random() < 0.9 else text[: r.randrange(len(text))]


def _object(r: random.Random) -> dict[str, Any]:
    return {str(r.choice(KEYS)): value(r, 3) for _ in range(r.randrange(5))}


def message(r: random.Random) -> dict[str, Any]:
    """A message whose form is often nearly right."""
    op = r.choice(OPS)
    src = r.choice(SOURCES)
    m: dict[str, Any] = {"op": op, "run": RUN, "src": src, "ino": r.randrange(3), "off": r.randrange(1000)}
    m |= {
        "lines": [line(r, src) for _ in range(r.randrange(4))],
        "coord": COORD,
        "state": "exited",
        "pid": 4,
        "ts": 2.0,
    }
    for _ in range(r.randrange(3)):
        m[str(r.choice((*m, *KEYS, "lines", "ino", "off", "src", "n", "nonce", "stage", "gpus")))] = value(r)
    if r.random() < 0.1:
        m.pop(r.choice(list(m)))
    return m


def taken(decoder: Decoder, s: Snapshot, m: dict[str, Any]) -> Snapshot:
    """One message the whole way: off the wire if it may pass, translated, written, read back, folded."""
    for event in decoder.events(parse(json.dumps(m))):
        back = ev.from_json(event.kind, 1.0, json.loads(json.dumps(ev.to_json(event))))
        assert back is not None
        assert type(back) is type(event), (event, back)  # what is written can be read
        s = reduce(s, back)
    return s


def bounded(s: Snapshot, decoder: Decoder) -> None:
    """A pod has a place of its own in the picture, and no more than that."""
    own = {COORD, "p1r0s0t1"}
    assert set(s.workers) <= own
    assert set(s.series) <= own
    assert set(s.facts) <= own
    assert set(s.waits) <= own | {POD}
    assert all(len(names) <= 80 for names in s.series.values())
    assert len(s.agreement) <= 64
    assert all(a.epoch <= 200 for a in s.agreement)
    assert len(decoder.cursors) <= 512
    for entry in s.log[-5:]:
        assert entry.text.isprintable()
        assert entry.source.isprintable()


def test_no_message_of_an_agent_stops_its_stream() -> None:
    r = random.Random(SEED)
    coords = [COORD, "p1r0s0t1"]
    decoder, s = Decoder(POD, RUN, "full", COORD, coords=coords, steps=100), Snapshot()
    s = reduce(s, ev.PodChanged(pod=POD, party=1, replica=0, provider="local", state="agent"))
    s = reduce(s, ev.PhaseStarted(phase="full", engine_run=RUN, steps=100, sid_job=""))
    furthest = -1
    for n in range(INPUTS):
        s = taken(decoder, s, message(r))
        furthest = max(furthest, s.workers[COORD].step if COORD in s.workers else -1)
        if n % 500 == 0:
            bounded(s, decoder)
            alerts.detect(s, 10.0)
    bounded(s, decoder)
    assert s.malformed.get(POD, 0) > INPUTS // 20
    assert furthest >= 0  # some of it was good, and came through


def test_no_row_of_a_journal_stops_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UVCC_STRICT", "")
    r = random.Random(SEED + 1)
    names = sorted({f for k in KINDS for f in ev.checks(k)})
    s, harmless = Snapshot(), 0
    for n in range(INPUTS):
        data: Any = (
            {str(r.choice(names)): value(r, 4) for _ in range(r.randrange(12))} if r.random() < 0.95 else value(r)
        )
        kind = r.choice(KINDS)
        if r.random() < 0.5 and isinstance(data, dict):  # of the right types, so that it reaches the reducer
            data = {name: typed(r, name, check) for name, check in ev.checks(kind).items()}
        ts = value(r, 0) if r.random() < 0.1 else 5.0
        event = ev.from_json(kind, ts, data)
        assert event is not None
        text = json.dumps(data)
        if is_harmless(text):  # most rows of a real journal: read without looking into each text, to the same event
            harmless += 1
            read = json.loads(text)
            assert repr(ev.from_json(kind, ts, read, harmless=True)) == repr(ev.from_json(kind, ts, read))
        s = reduce(s, event)
        if n % 200 == 0:
            alerts.detect(s, 10.0)
            s = Snapshot()
    assert isinstance(fold([]), Snapshot)
    assert INPUTS // 10 < harmless < INPUTS


def typed(r: random.Random, name: str, check: Callable[[Any], Any]) -> Any:
    """A value that the field's own check lets pass."""
    for _ in range(60):
        found = value(r, 4)
        try:
            check(found)
        except (TypeError, ValueError):
            continue
        return found
    return None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(KEYS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), inner),
    max_leaves=12,
)


@pytest.mark.ci(__file__)
@settings(max_examples=max(60, INPUTS // 50), deadline=None)
@given(
    st.sampled_from(OPS), st.sampled_from(SOURCES), JSON, st.lists(JSON, max_size=3), st.dictionaries(st.text(), JSON)
)
def test_arbitrary_json_in_every_place(op: str, src: str, record: Any, listed: list[Any], more: dict[str, Any]) -> None:
    decoder = Decoder(POD, RUN, "full", COORD, coords=[COORD], steps=100)
    rows = [json.dumps(record), *listed]
    s = taken(decoder, Snapshot(), {"op": op, "run": RUN, "src": src, "ino": 1, "off": 2, "lines": rows, **more})
    s = taken(decoder, s, {"op": op, "run": RUN, "src": src, "ino": record, "off": 2, "lines": record, **more})
    assert set(s.workers) <= {COORD}
    for written in (record, json.dumps(record)):
        Published().take(COORD, relay_words.roots(written), 100)


@settings(max_examples=max(100, INPUTS // 20), deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda t: t.encode(errors="surrogatepass")))
def test_arbitrary_bytes_on_the_wire(data: bytes) -> None:
    lines = agent_lines.LineReader(longest=50)
    for found in (*lines.feed(data), *lines.feed(b"\n")):
        parse(found)


def test_what_is_written_can_be_read_from_the_file(tmp_path: Path) -> None:
    r = random.Random(SEED + 2)
    journal = Journal(tmp_path / "journal.sqlite")
    decoder = Decoder(POD, RUN, "full", COORD, coords=[COORD], steps=100)
    for _ in range(300):
        events = decoder.events(parse(json.dumps(message(r))))
        if events:
            journal.append(*events)
    s = read_all(journal)
    journal.close()
    assert not any(where == "journal" for where in s.malformed)
    bounded(s, decoder)
