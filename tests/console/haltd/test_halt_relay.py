"""The halt path over the relay: a run that no SSH reaches is halted by signed records, with signed evidence."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from relaykit import COORD, QUICK, RUN, TOKENS, make_run, relay  # noqa: F401

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal, read_all
from uvcc_console.halt import relay_path as path_over_relay
from uvcc_console.haltd.service import Service
from uvcc_console.runs import domain
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.peer_protocol import relay_words
from uvcc_engine.contract.peer_protocol.relay_words import FetchedRecord
from uvcc_engine.contract.run_files.control import read_halt
from uvcc_engine.transcript.signed.orders import BEAT_NAMESPACE, sealed
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.worker.relay_control import Orders


async def _until(journal: Journal, stage: str) -> tuple[str, int, str, float]:
    async with asyncio.timeout(120):
        while True:
            ack = read_all(journal).halt.acks.get("p0r0")
            if ack is not None and ack[0] == stage:
                return ack
            await asyncio.sleep(0.02)


async def test_a_run_out_of_reach_holds_and_halts_by_signed_records(relay: str, tmp_path: Path) -> None:  # noqa: F811
    identity = Identity.create(tmp_path / "identity")
    run_dir, journal = make_run(relay, identity.public.ed25519)
    pod = tmp_path / "pod"
    pod.mkdir()
    (pod / "token").write_text(TOKENS[0])
    link = LinkSpec(
        relay_url=relay,
        token_file=str(pod / "token"),
        halt_keys=[path_over_relay.order_key(run_dir)],
        halt_readers=domain.readers(run_dir),
        halt_seal=domain.order_seal(run_dir),
    )

    def beat() -> dict[str, Any]:
        """What a worker does that obeys its control file."""
        asked = read_halt(pod, RUN)
        if asked is None:
            return {"step": 4, "phase": "train"}
        if asked.mode == "hold":
            return {"step": 5, "phase": "hold", "halt_nonce": asked.nonce}
        return {"step": 5, "phase": "halted", "halt_nonce": asked.nonce, "checkpoint": "c0ffee"}

    service = asyncio.create_task(Service(run_dir, times=QUICK).run())
    sign = lambda payload: identity.sign(BEAT_NAMESPACE, payload)  # noqa: E731
    worker = Orders(link, RUN, COORD, pod, sign=sign, last=beat, told=lambda asked: None)
    try:
        with worker:
            journal.append(ev.HaltRequested(nonce="n", mode="hold", by="test"))
            assert (await _until(journal, "held"))[1] == 5
            journal.append(ev.HaltRequested(nonce="n", mode="halt", by="test"))
            assert (await _until(journal, "halted"))[1:3] == (5, "c0ffee")
        paths_of = {e.path for _, e in journal.since(0) if isinstance(e, ev.HaltAck) and e.stage in ("held", "halted")}
        assert paths_of == {"relay"}
        assert read_all(journal).pods["p0r0"].paths["relay"][0]  # its lamp is lit
        assert not read_all(journal).halt.verified  # its processes are not proven gone: nothing is claimed
    finally:
        service.cancel()
        await asyncio.gather(service, return_exceptions=True)
        journal.close()


def test_what_another_identity_signed_is_no_evidence(tmp_path: Path) -> None:
    ours, theirs = Identity.create(tmp_path / "a"), Identity.create(tmp_path / "b")
    _, journal = make_run("http://127.0.0.1:1", ours.public.ed25519)
    s = read_all(journal)
    journal.close()
    heard: list[str] = []
    over = path_over_relay.RelayHaltPath(
        tmp_path, lambda events: None, lambda pod, coord, stage, step, checkpoint: heard.append(stage)
    )
    box = path_over_relay.RelayMailbox("", "g", RUN, ())
    from uvcc_engine.transcript.signed import boxes, orders

    content = {"run": RUN, "coord": COORD, "phase": "halted", "halt_nonce": s.halt.nonce, "step": 3}
    over.hear(box, orders.sealed(content, lambda p: theirs.sign(BEAT_NAMESPACE, p)), s)
    assert heard == []
    over.hear(box, orders.sealed(content, lambda p: ours.sign(BEAT_NAMESPACE, p)), s)
    assert heard == ["halted"]
    for readers, counts in (([path_over_relay.reader(tmp_path)], 2), ([path_over_relay.reader(tmp_path / "a")], 2)):
        keys = boxes.read_keys(boxes.public_of(r) for r in readers)
        over.hear(box, boxes.seal_to(orders.sealed(content, lambda p: ours.sign(BEAT_NAMESPACE, p)), keys), s)
        assert len(heard) == counts  # what is sealed to another console is nothing here


async def test_no_record_at_the_relay_keeps_the_next_from_being_heard(tmp_path: Path, monkeypatch: Any) -> None:
    ours = Identity.create(tmp_path / "a")
    _, journal = make_run("http://127.0.0.1:1", ours.public.ed25519)
    s = read_all(journal)
    journal.close()
    heard: list[tuple[str, int]] = []
    told: list[ev.Event] = []
    (tmp_path / "domain.json").write_text("{}")
    over = path_over_relay.RelayHaltPath(
        tmp_path, told.extend, lambda pod, coord, stage, step, checkpoint: heard.append((coord, step))
    )
    from uvcc_engine.transcript.signed import orders

    def signed(**content: Any) -> dict[str, Any]:
        usual = {"run": RUN, "coord": COORD, "phase": "halted", "halt_nonce": s.halt.nonce, "step": 3}
        return {"name": "beat/x", "body": orders.sealed(usual | content, lambda p: ours.sign(BEAT_NAMESPACE, p))}

    roots = '[{"epoch": 1, "root": "ab", "pairs": {}}, {"epoch": "x"}]'
    odd = [
        signed(step="12/100"),
        signed(step=None),
        signed(step=True),
        signed(phase=["halted"]),
        signed(coord="p0r0s0t99999"),
        signed(coord="p0r0s" + "9" * 5000 + "t0"),
        signed(coord="p0r0s0t0\x1b[2J"),
        signed(coord=[COORD]),
        {"name": 7, "body": None},
        {"name": "beat/x", "body": "[" * 100_000},
        {"name": "order/x", "body": {"a": 1}},
        {"body": "x"},
    ]
    good = [signed(step=4, roots=roots), signed(step=5, roots="[" * 100_000), signed(step=6, roots=["x"])]
    given = relay_words.answer(json.dumps({"seq": 1, "records": [*odd, *good]}).encode())
    assert isinstance(given, relay_words.RelayAnswer)
    monkeypatch.setattr(path_over_relay.RelayMailbox, "exchange", lambda self, put, want: given.records)
    box = path_over_relay.RelayMailbox("", "g", RUN, ())
    await over.exchange_with(box, None, s)
    assert heard == [(COORD, 4), (COORD, 5), (COORD, 6)]
    assert sum(isinstance(e, ev.LinesMalformed) for e in told) >= 6
    assert {e.coord for e in told if isinstance(e, ev.HeartbeatRead)} == {COORD}
    assert not [e for e in told if isinstance(e, ev.RootReported)]  # a list that is damaged says nothing


@pytest.mark.parametrize("way", ["exited", "halted", "alive"])
async def test_the_lamp_of_a_pod_goes_out_where_workers_fall_silent_and_not_where_they_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Half a minute behind every halt, or in a long verification, a dead path was told of as an error."""
    ours = Identity.create(tmp_path / "a")
    _, journal = make_run("http://127.0.0.1:1", ours.public.ed25519)
    told: list[ev.Event] = []
    over = path_over_relay.RelayHaltPath(tmp_path, told.extend, lambda pod, coord, stage, step, checkpoint: None)
    content = {"run": RUN, "coord": COORD, "phase": "train", "step": 3}
    signed = {"name": "beat/x", "body": sealed(content, lambda p: ours.sign(BEAT_NAMESPACE, p))}
    given = relay_words.answer(json.dumps({"seq": 1, "records": [signed]}).encode())
    assert isinstance(given, relay_words.RelayAnswer)
    found = [given.records, [], []]
    monkeypatch.setattr(path_over_relay.RelayMailbox, "exchange", lambda self, put, want: found.pop(0))
    box = path_over_relay.RelayMailbox("", "g", RUN, ())
    await over.exchange_with(box, None, read_all(journal))
    monkeypatch.setattr(path_over_relay, "FRESH_S", 0.0)
    journal.append(ev.WorkerProcess(pod="p0r0", coord=COORD, pid=7, state="started"))
    if way == "halted":  # while nobody read what its workers wrote
        journal.append(ev.HaltRequested(nonce="n", mode="halt", by="op"))
        journal.append(ev.HaltAck(nonce="n", pod="p0r0", stage="halted", path="relay"))
    elif way == "exited":
        journal.append(ev.WorkerProcess(pod="p0r0", coord=COORD, pid=7, state="exited", rc=0))
    await over.exchange_with(box, None, read_all(journal))
    lamps = [(e.pod, e.path, e.up) for e in told if isinstance(e, ev.LinkChanged)]
    assert lamps == [("p0r0", "relay", True)] + [("p0r0", "relay", False)] * (way == "alive")
    journal.append(ev.PhaseStarted(phase="full", engine_run=RUN, steps=9, sid_job="", attempt=1))
    journal.append(ev.WorkerProcess(pod="p0r0", coord=COORD, pid=8, state="started"))
    await over.exchange_with(box, None, read_all(journal))
    assert [e.up for e in told if isinstance(e, ev.LinkChanged)] == [True, False]  # who came back is heard, or is not
    journal.close()


def test_a_relay_that_answers_anything_is_an_error_of_that_path(tmp_path: Path) -> None:
    import http.server
    import threading

    from uvcc_engine.contract.errors import UvccError

    answers = [
        b"[]",
        b"{}",
        b'{"seq":"x","records":[]}',
        b'{"seq":1,"records":7}',
        b"[" * 100_000,
        b"\xff",
        b'{"seq":1e999}',
    ]

    class Answering(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            body = answers[0]
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            return

    server = http.server.HTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        box = path_over_relay.RelayMailbox(f"http://127.0.0.1:{server.server_port}", "g", RUN, ("token",))
        while answers:
            with pytest.raises(UvccError):
                box.exchange(None, "")
            answers.pop(0)
        answers.append(b'{"seq": 3, "records": [7, {"name": "a", "body": "b"}]}')
        assert box.exchange(None, "") == [FetchedRecord(name="a", body="b")]
        assert box.after == 3
    finally:
        server.shutdown()
        server.server_close()
        thread.join(120)
