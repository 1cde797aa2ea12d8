"""Three sessions in one process: a forked transcript is named by its message, a differing state by its holders."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cryptography
import pytest
from private_kit import PARTIES, Fleet, opened_digits

from uvcc_engine.contract.errors import PeerLostError, ProtocolError, UvccError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.contract.machine import host
from uvcc_engine.contract.run_files.writer import RunWriter
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.mpc.foundation.drawn_ahead import DrawAhead, ForetoldDraws, draws_unlocked
from uvcc_engine.mpc.foundation.local import LocalPlane, Wire
from uvcc_engine.mpc.foundation.prg import Stream
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.parallel.place import RankAddress
from uvcc_engine.plane.api import Buffer, Tag
from uvcc_engine.worker.admission import Admission
from uvcc_engine.worker.compute_setup import draw_ahead_for
from uvcc_engine.worker.consensus import StepConsensus
from uvcc_engine.worker.late_recorder import LateRecorder
from uvcc_engine.worker.outcome import agree_on_state
from uvcc_engine.worker.ranks import Ranks
from uvcc_engine.worker.session import RunOutcome, WorkerSession

JOB = PrivateJob(steps=3, batch=8, test_rows=20, model="logistic-digits")
Alter = Callable[[int, int, int, Tag], bool]


class Recorded(LocalPlane):
    """A local plane that records as the live one does; ``alter`` says which records hold something else."""

    def __init__(self, wire: Wire, party: int, recorder: LateRecorder, alter: Alter) -> None:
        super().__init__(wire, party)
        self._recorder, self._alter = recorder, alter

    def _note(self, direction: int, peer: int, tag: Tag, payload: Buffer) -> None:
        seen = bytes(payload)
        if self._alter(self.party, direction, peer, tag):
            seen = seen[:-1] + bytes([seen[-1] ^ 1])
        self._recorder.record(direction, peer, tag, seen)

    def send(self, dst: int, tag: Tag, payload: Buffer) -> None:
        self._note(0, dst, tag, payload)
        super().send(dst, tag, payload)

    def recv(self, src: int, tag: Tag) -> memoryview:
        found = super().recv(src, tag)
        self._note(1, src, tag, found)
        return found


def run_sessions(folder: Path, alter: Alter) -> list[RunOutcome | UvccError]:
    fleet = Fleet(folder, None, JOB, [{}, {}, {}])  # type: ignore[arg-type]  # no process is started
    inputs, wire, done = opened_digits(JOB), Wire(wait_s=150.0), threading.Barrier(3, timeout=120)

    def body(party: int) -> RunOutcome | UvccError:
        recorder = LateRecorder()
        plane = Recorded(wire, party, recorder, alter)
        coord = Coord(0, party, 0, 0)
        admitted = Admission(fleet.policy, PARTIES[party], JOB, find_model(JOB.model), inputs[party], coord)
        table = StepConsensus(plane, fleet.run, wait_s=150.0)
        with RunWriter.open(fleet.dir(party), fleet.run, 0, str(coord)) as writer:
            groups = PartyGroups.open(RankAddress(coord, admitted.policy.topology), on_event=lambda name, fields: None)
            ranks = Ranks(groups)
            table.among_ranks = ranks.greatest
            session = WorkerSession(fleet.spec(party), admitted, writer, plane, recorder, table, ranks, lambda: False)
            try:
                return session.run()
            except PeerLostError as error:
                return table.reason_of(error)
            except UvccError as error:
                table.tell_stopped(error)
                wire.abort()  # nobody waits for what it will not send
                return error
            finally:
                session.close()
                done.wait()

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(body, range(3)))


def test_sessions_that_agree_end_alike(tmp_path: Path) -> None:
    assert run_sessions(tmp_path, lambda *place: False) == [RunOutcome("done", 3)] * 3


def test_a_worker_draws_ahead_where_its_pod_has_a_core_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, forecast = [], DrawAhead.forecast

    def noted(self: DrawAhead, streams: Mapping[int, Stream], stream: int) -> ForetoldDraws:
        made.append(forecast(self, streams, stream))
        return made[-1]

    monkeypatch.setattr(DrawAhead, "forecast", noted)
    monkeypatch.setattr(host, "cpu_limit", lambda: 4.0)
    assert run_sessions(tmp_path, lambda *place: False) == [RunOutcome("done", 3)] * 3
    assert len(made) == 3
    assert (draw_ahead_for(Topology(8)) is None, draw_ahead_for(Topology(1, 2))) == (not draws_unlocked(), None)
    monkeypatch.setattr(host, "cpu_limit", lambda: 3.5)
    assert draw_ahead_for(Topology()) is None
    monkeypatch.setattr(host, "cpu_limit", lambda: 64.0)
    monkeypatch.setattr(cryptography, "__version__", "49.0.1")  # which draws under the interpreter's lock
    assert draw_ahead_for(Topology()) is None


def test_a_forked_transcript_names_the_pair_the_epoch_and_the_message(tmp_path: Path) -> None:
    hits: list[Tag] = []

    def alter(party: int, direction: int, peer: int, tag: Tag) -> bool:
        if (party, direction, peer, tag.epoch) != (1, 1, 0, 1) or hits:
            return False
        hits.append(tag)
        return True

    found = run_sessions(tmp_path, alter)
    for party, peer in ((0, 1), (1, 0)):
        error = found[party]
        assert isinstance(error, ProtocolError), found
        assert error.party == peer
        assert f"fork at epoch 1: P{party} and P{peer}" in error.what
        assert f"op {hits[0].op})" in error.what
        assert "P0->P1" in error.what
    assert isinstance(found[2], UvccError)
    assert "fork at epoch 1" in found[2].what


def test_a_differing_final_state_names_its_holders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = PrivateTrainer.component_digest

    def digest(self: PrivateTrainer, component: str, blind: bytes) -> str:
        found = exact(self, component, blind)
        return "0" * 64 if self._rt.party == 2 and component == "first" else found

    monkeypatch.setattr(PrivateTrainer, "component_digest", digest)
    found = run_sessions(tmp_path, lambda *place: False)
    assert all(isinstance(e, UvccError) for e in found)
    whats = [e.what for e in found if isinstance(e, UvccError)]
    assert any("P1 and P2 hold different copies of component 2" in what for what in whats)


class Said:
    """A plane whose control stream holds what the test wants."""

    party = 0

    def __init__(self, heard: dict[int, Any]) -> None:
        self._heard = heard

    def send_control(self, dst: int, body: bytes) -> None:
        assert set(json.loads(body)["digests"]) == {"0", "1"}

    def recv_control(self, src: int, timeout: float | None = None) -> bytes:
        return json.dumps({"topic": "state", "run": "r", **self._heard[src]}).encode()


@pytest.mark.parametrize("digests", [{"1": "b" * 64}, {"0": "a" * 64, "1": "b" * 64}, {"1": 7, "2": "c" * 64}, None])
def test_malformed_state_digests_name_the_sender(digests: Any) -> None:
    mine = {0: "a" * 64, 1: "b" * 64}
    good = {1: {"digests": {"1": "b" * 64, "2": "c" * 64}}, 2: {"digests": {"2": "c" * 64, "0": "a" * 64}}}
    assert agree_on_state(StepConsensus(Said(good), "r"), mine) == ["a" * 64, "b" * 64, "c" * 64]
    with pytest.raises(ProtocolError) as error:
        agree_on_state(StepConsensus(Said({**good, 1: {"digests": digests}}), "r"), mine)
    assert error.value.party == 1
