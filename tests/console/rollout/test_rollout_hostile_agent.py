"""Agents that say anything at all: the pod's stream goes on, what is odd is counted, and it speaks only for itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.supervision import SideTasks
from uvcc_console.fleet import agent_lines
from uvcc_console.fleet.provider import PodRequest
from uvcc_console.rollout import ingest
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Member
from uvcc_console.rollout.decoder import MOST_FILES, MOST_NAMES, Decoder
from uvcc_engine.contract.agent_protocol.agent_messages import AgentMessage, Lines, Unknown, parse, to_json
from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.contract.run_files.records import Malformed

RUN, POD, COORD = "demo-1.full", "p1r0", "p1r0s0t0"
DEEP = "[" * 100_000


def lines(src: str, *rows: str, off: int = 10, ino: int = 5) -> Lines:
    return Lines(run=RUN, src=src, ino=ino, off=off, lines=list(rows))


def wired(m: dict[str, Any]) -> AgentMessage | Malformed:
    """As it comes off the wire."""
    return parse(json.dumps(m))


def process(**fields: Any) -> AgentMessage | Malformed:
    return wired({"op": "proc", "run": RUN, "coord": COORD, "state": "exited", "pid": 1} | fields)


def vital(**fields: Any) -> AgentMessage | Malformed:
    known = {"ts": 1.0, "cpu": 0.1, "mem_mib": 1, "disk_free_mib": 1, "gpus": []}
    return wired({"op": "telemetry", **known} | fields)


def decoder(**more: Any) -> Decoder:
    return Decoder(POD, RUN, "full", COORD, **({"coords": [COORD, "p1r0s0t1"], "steps": 100} | more))


def beat(**fields: Any) -> Lines:
    return lines("heartbeat_rank0.jsonl", json.dumps({"coord": COORD, "step": 3, "phase": "train"} | fields))


def event(name: str, fields: Any, **more: Any) -> Lines:
    return lines("events.jsonl", json.dumps({"ts": 1.0, "level": "info", "event": name, "fields": fields} | more))


ROOT = {"coord": COORD, "epoch": 3, "root": "ab", "pairs": {"p0r0s0t0": "cd"}}
ODD: dict[str, AgentMessage | Malformed] = {
    "a step that is null": beat(step=None),
    "a step in words": beat(step="12/100"),
    "a step of a bool": beat(step=True),
    "a step without end": lines("heartbeat_rank0.jsonl", '{"step": 1e400}'),
    "a step that is no number": lines("heartbeat_rank0.jsonl", '{"step": NaN}'),
    "a step beyond any run": beat(step=10**18),
    "a number of thousands of digits": lines("heartbeat_rank0.jsonl", '{"step": ' + "9" * 5000 + "}"),
    "a phase that is a list": beat(phase=["train"]),
    "another pod's worker": beat(coord="p0r0s0t0"),
    "a worker that is a list": beat(coord=[COORD]),
    "a heartbeat that is a list": lines("heartbeat_rank0.jsonl", "[1]"),
    "nesting without end": lines("events.jsonl", DEEP),
    "fields that are a list": event("waiting", ["a"]),
    "an event without a name": event("", {}),
    "an event whose name is no word": event("a b\x1b[31m", {}),
    "an event with a time in words": event("waiting", {}, ts="x"),
    "a checkpoint of no step": event("checkpoint_written", {"step": "x"}),
    "an event of another pod's worker": event("waiting", {"coord": "p2r0s0t0"}),
    "a root without a root": event("epoch_root", {k: v for k, v in ROOT.items() if k != "root"}),
    "a root of no epoch": event("epoch_root", ROOT | {"epoch": "x"}),
    "a root of an epoch far beyond": event("epoch_root", ROOT | {"epoch": 1000}),
    "a root of another pod": event("epoch_root", ROOT | {"coord": "p0r0s0t0"}),
    "pairs that are a list": event("epoch_root", ROOT | {"pairs": ["p0r0s0t0"]}),
    "pairs without end": event("epoch_root", ROOT | {"pairs": {f"p{i}": "ab" for i in range(1000)}}),
    "a digest of a megabyte": event("epoch_root", ROOT | {"root": "a" * (1 << 20)}),
    "a row whose step is infinite": lines("training.csv", "inf,1,1,1"),
    "a row whose step is no number": lines("training.csv", "nan,1,1,1"),
    "a row of a step in part": lines("training.csv", "1.5,1,1,1"),
    "a header of thousands of columns": lines("training.csv", "step," + ",".join(f"c{i}" for i in range(5000))),
    "a header with escapes": lines("training.csv", "step,\x1b[31mloss"),
    "a result of another pod": lines(
        "result_rank0.json", json.dumps({"run": RUN, "coord": "p0r0s0t0", "result_hash": "ab", "values": {}})
    ),
    "a result whose values are a list": lines(
        "result_rank0.json", json.dumps({"run": RUN, "coord": COORD, "result_hash": "ab", "values": [1]})
    ),
    "a document without end": lines("result.json", "{" + " " * (2 << 20)),
    "an end of another pod": lines("exit.json", json.dumps({"run": RUN, "coord": "p0r0s0t0", "status": "failed"})),
    "a line that is a number": wired({**to_json(lines("worker.log")), "lines": ["x", 7]}),
    "lines that are none": wired({**to_json(lines("worker.log")), "lines": "abc"}),
    "a cursor in words": wired({**to_json(lines("worker.log", "x")), "off": "far"}),
    "an inode that is none": wired({**to_json(lines("worker.log", "x")), "ino": None}),
    "a file that is a list": wired({**to_json(lines("worker.log", "x")), "src": ["a"]}),
    "a process of another pod": wired(
        {"op": "proc", "run": RUN, "coord": "p0r0s0t0", "state": "exited", "pid": 1, "rc": 0}
    ),
    "a process that is no number": process(pid="1"),
    "a code that is no number": wired(
        {"op": "proc", "run": RUN, "coord": COORD, "state": "exited", "pid": 1, "rc": "x"}
    ),
    "a state that is none": process(state="flying"),
    "vital signs at no time": wired(
        {"op": "telemetry", "ts": "x", "cpu": 0.1, "mem_mib": 1, "disk_free_mib": 1, "gpus": []}
    ),
    "vital signs in words": vital(cpu="half"),
    "gpus that are none": wired(
        {"op": "telemetry", "ts": 1.0, "cpu": 0.1, "mem_mib": 1, "disk_free_mib": 1, "gpus": 7}
    ),
    "drops that are no number": wired({"op": "dropped", "run": RUN, "n": None}),
}


@pytest.mark.parametrize("what", ODD)
def test_what_cannot_be_used_is_counted_and_nothing_else_comes_of_it(what: str) -> None:
    i = decoder()
    found = i.events(ODD[what])
    odd = [e for e in found if isinstance(e, ev.LinesMalformed)]
    assert len(odd) == 1
    assert odd[0].where == POD
    assert len(odd[0].sample) <= 200
    assert odd[0].sample == "" or odd[0].sample.isprintable()
    rest = [e for e in found if not isinstance(e, ev.LinesMalformed)]
    assert all(isinstance(e, ev.LogLines) and e.lines == ["x"] for e in rest)
    good = i.events(beat(step=4))  # and the stream goes on
    assert [type(e) for e in good] == [ev.HeartbeatRead]


@pytest.mark.parametrize("name", ["succession", "verifier_ok", "halt_done", "dp_preflight_ok"])
def test_a_pod_does_not_speak_for_the_console(name: str) -> None:
    (found,) = decoder().events(event(name, {"phase": "full", "engine_run": "evil"}))
    assert isinstance(found, ev.EngineEvent)
    assert (found.pod, found.event, found.fields["event"]) == (POD, "reserved_event", name)


def test_a_message_that_is_none_never_leaves_the_channel() -> None:
    for m in ODD.values():
        read = parse(json.dumps(to_json(m))) if isinstance(m, Lines) else m
        assert decoder().events(read) is not None
    for line in (b"", b"{", b"\xff\xfe", b"[]", b'{"op": 7}', DEEP.encode(), b'{"op":"halted","step":' + b"9" * 5000):
        assert isinstance(parse(line), Malformed)
    assert isinstance(parse(b'{"op":"lines","run":"../x","src":"a","ino":1,"off":1,"lines":[]}'), Malformed)
    assert isinstance(parse(b'{"op":"lines","run":"r","src":"../a","ino":1,"off":1,"lines":[]}'), Malformed)
    assert isinstance(parse(b'{"op":"halted","run":"r","nonce":"n","stage":"held","step":true}'), Malformed)
    dropped = b'{"op":"dropped","run":"demo-1.full","src":"a","n":3}'
    assert [type(e) for e in decoder().events(parse(dropped))] == [ev.Alert]
    assert parse(b'{"op":"of-a-newer-agent","x":1}') == Unknown("of-a-newer-agent")


def test_a_line_without_end_costs_no_more_memory_than_one_may() -> None:
    reader = agent_lines.LineReader(longest=100)
    assert reader.feed(b"a" * 90) == []
    assert reader.feed(b"b" * 20) == []
    assert reader.feed(b"c" * 1000) == []
    assert (reader._size, reader.overlong) == (0, 1)
    assert reader.feed(b"d\n{}\n" + b"e" * 101 + b"\nf") == [b"{}"]
    assert reader.feed(b"g\n") == [b"fg"]
    assert reader.overlong == 2


def test_a_pod_cannot_name_figures_or_files_without_end() -> None:
    i = decoder()
    for n in range(200):
        header = "step," + ",".join(f"f{n}_{k}" for k in range(20))
        i.events(lines("training.csv", header, "1," + ",".join(["1"] * 20)))
    for n in range(2 * MOST_FILES):
        i.events(lines(f"worker_{n}.log", "x"))
    assert len(i._names) <= MOST_NAMES
    assert len(i.cursors) == MOST_FILES
    long = i.events(lines("worker_1.log", "x" * 100_000))
    assert isinstance(long[0], ev.LogLines)
    assert len(long[0].lines[0]) == 4096


def test_log_lines_and_names_hold_nothing_that_a_terminal_obeys() -> None:
    i = decoder()
    found = i.events(lines("worker_\x1b]0;x\x07.log", "\x1b[2Jhi\u202e\x9b31m there\r\nforged"))
    assert found == [ev.LogLines(pod=POD, src="worker_.log", lines=["hi there  forged"])]
    told = i.events(event("waiting", {"peer": 2, "detail": "\x1b[31mred\u2066"}, level="loud"))
    assert told == [ev.EngineEvent(pod=POD, level="info", event="waiting", fields={"peer": 2, "detail": "red"}, at=1.0)]


def test_a_loss_that_is_no_number_is_a_finding_not_a_malformed_line() -> None:
    found = decoder().events(lines("training.csv", "7,nan,0.1,3"))
    assert isinstance(found[0], ev.Metric)
    assert found[0].values["loss"] != found[0].values["loss"]
    shown = decoder().events(lines("heartbeat_rank0.jsonl", '{"step": 7, "loss": NaN, "mem_mib": NaN}'))
    assert isinstance(shown[0], ev.HeartbeatRead)
    assert set(shown[0].record) == {"step", "loss"}


def test_a_document_that_is_replaced_half_read_is_read_anew() -> None:
    i = decoder()
    whole = json.dumps({"run": RUN, "coord": COORD, "result_hash": "ab", "values": {"loss": 0.5}})
    assert i.events(lines("result.json", whole[:20], ino=1)) == []
    assert [type(e) for e in i.events(lines("result.json", whole, ino=2))] == [ev.ResultReported]


class Channel:
    """An agent's channel of the test's own."""

    def __init__(self, *messages: dict[str, Any] | Exception) -> None:
        self._messages = iter(messages)  # whoever asks again gets the rest

    async def messages(self) -> AsyncIterator[AgentMessage | Malformed]:
        for m in self._messages:
            await asyncio.sleep(0)
            if isinstance(m, Exception):
                raise m
            yield m


def ingested(tmp_path: Path, *messages: dict[str, Any] | Exception) -> tuple[Bus, Journal, Member]:
    journal = Journal(tmp_path / "journal.sqlite")
    bus, member = Bus(journal), Member(POD, PodRequest(POD, 1, 0))
    member.agent = cast(Any, Channel(*messages))
    member.decoders[RUN] = decoder()
    return bus, journal, member


async def test_every_odd_message_in_a_row_leaves_the_stream_and_its_cursor(tmp_path: Path) -> None:
    bus, journal, member = ingested(tmp_path, *ODD.values(), *[lines("worker.log", off=9)] * 500, beat(step=9))
    await ingest.run(bus, member)
    bus.commit()
    assert bus.snapshot.workers[COORD].step == 9
    assert bus.snapshot.malformed[POD] == len(ODD)
    odd = [e for _, e in journal.since(0) if isinstance(e, ev.LinesMalformed)]
    assert len(odd) <= 3  # a burst is one event and its rest
    assert sum(bool(e.sample) for e in odd) == 1
    assert not bus.snapshot.alerts
    journal.close()


async def test_an_error_of_the_program_in_one_message_is_told_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bus, journal, member = ingested(tmp_path, beat(step=1), beat(step=2), beat(step=3), beat(step=4))
    real = member.decoders[RUN].events

    def broken(message: dict[str, Any]) -> list[ev.Event]:
        if '"step": 2' in message.lines[0] or '"step": 3' in message.lines[0]:
            raise ZeroDivisionError("a defect\x1b[31m")
        return real(message)

    monkeypatch.setattr(member.decoders[RUN], "events", broken)
    await ingest.run(bus, member)
    bus.commit()
    assert bus.snapshot.workers[COORD].step == 4
    assert bus.snapshot.malformed[POD] == 2
    assert [a.text.split(":")[0] for a in bus.snapshot.alerts] == ["a message (Lines) could not be read"]
    assert "ZeroDivisionError" in bus.snapshot.alerts[0].text
    assert "\x1b" not in bus.snapshot.alerts[0].text
    assert "ZeroDivisionError" in caplog.text
    journal.close()


async def test_an_ingest_that_dies_is_told_and_reads_on(tmp_path: Path) -> None:
    bus, journal, member = ingested(tmp_path, beat(step=1), RuntimeError("the channel \x1b[31mbroke"), beat(step=2))

    async def at_once(_: float) -> None:
        await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        beside = SideTasks(group, lambda event: bus.record([event]), pytest.fail, sleep=at_once)
        ingest.start(beside, bus, member)
    bus.commit()
    (alert,) = bus.snapshot.alerts
    assert alert.source == f"the ingest of {POD}"
    assert "RuntimeError: the channel broke" in alert.text
    assert bus.snapshot.workers[COORD].step == 2
    journal.close()


async def test_a_listener_that_fails_stops_neither_the_journal_nor_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UVCC_STRICT", "")
    journal = Journal(tmp_path / "journal.sqlite")
    bus, heard = Bus(journal), []

    def deaf(event: ev.Event) -> None:
        raise KeyError(event.kind)

    bus.listen(deaf)
    bus.listen(heard.append)
    for _ in range(3):
        bus.commit(ev.Alert(level="info", name="n", text="t"))
    bus.commit()
    bus.commit()
    assert len([e for e in heard if isinstance(e, ev.Alert) and e.name == "n"]) == 3
    assert [a.source for a in bus.snapshot.alerts].count("listener") == 1  # once, however often it fails
    journal.close()


@pytest.mark.parametrize(
    "ack",
    [{}, {"workers": None}, {"workers": ["x"]}, {"workers": [{"coord": 7, "pid": 1}]}, {"workers": [{"pid": "x"}]}],
)
def test_acknowledgements_are_read_or_refused_by_name(ack: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="p1r0"):
        agent_lines.workers(ack, POD)


def test_a_pod_may_not_speak_of_others_workers_nor_of_other_places() -> None:
    assert agent_lines.own([COORD], [COORD].__contains__, POD) == [COORD]
    for named in (["../../.bashrc"], ["p0r0s0t0"], [7], [[COORD]]):
        with pytest.raises(ProtocolError, match="p1r0"):
            agent_lines.own(named, [COORD].__contains__, POD)
    assert agent_lines.listening_at({"url": "http://127.0.0.1:8080"}, POD) == ("http", 8080)
    for url in (None, 7, "file:///etc/passwd", "http://h:99999999", "http://h:0", "http://h/\x1b[2J:1"):
        with pytest.raises(ProtocolError, match="p1r0"):
            agent_lines.listening_at({"url": url}, POD)


PROBE: dict[str, Any] = {
    "clock": {"ts": 1.0},
    "disk": {"free_mib": 1.0},
    "memory": {"available_mib": 5.0},
    "versions": {"python": "3.11\x1b[31m"},
    "gpus": [{"index": 0, "name": "H100\u202e", "memory_used": 4}],
}


def test_a_probe_is_of_its_types_or_refused_by_name() -> None:
    found = agent_lines.probed(PROBE, POD)
    assert found["versions"] == {"python": "3.11"}
    assert found["gpus"][0]["name"] == "H100"
    for name, value in [
        ("clock", 7),
        ("clock", {"ts": "x"}),
        ("disk", {}),
        ("disk", {"free_mib": "much"}),
        ("memory", {"available_mib": None}),
        ("gpus", 7),
        ("gpus", ["x"]),
        ("gpus", [{"memory_used": "x"}]),
        ("imports", ["torch"]),
        ("versions", ["3.11"]),
    ]:
        with pytest.raises(ProtocolError, match=name):
            agent_lines.probed(PROBE | {name: value}, POD)
