"""What a step takes on this machine when three processes and their links share it, as local pods do.

``step_rehearsal`` counts rounds and bytes between threads of one process, which wait for their turn at Python and send
nothing. Seconds come from here: every party is a process of its own, seals what it sends, records it, signs a
root for each step and agrees on it with both peers, over the kind of link that the run will have.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import torch

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import PARTIES, Coord, Topology
from uvcc_engine.contract.machine import host
from uvcc_engine.contract.run_files.writer import RunWriter, Ticker
from uvcc_engine.model.learning.trainers import trainer_of
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.model.model_spec import ModelSpec
from uvcc_engine.mpc.foundation.local import rehearsal_keys
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.kernels.memory import keep_freed_memory
from uvcc_engine.plane.connect import open_plane
from uvcc_engine.plane.live import LivePlane
from uvcc_engine.proofs.settling import OwedVerdict
from uvcc_engine.relay import config as relay_config
from uvcc_engine.relay import server
from uvcc_engine.sealing.inputs import PartyInputs
from uvcc_engine.transcript.exchange.evidence import WorkerEvidence
from uvcc_engine.transcript.leaves.roots import sid_of
from uvcc_engine.transcript.signed.statements import Verdict
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy, PolicyParty

LINKS: Final = ("direct", "relay", "stream")
MOST_STEPS: Final = 24
"""Steps of the processes, at most; the first is not timed."""
EARLY: Final = 2
"""Of them, those after the first step whose buffers are new and whose loops are read for the first time."""
TIMED_S: Final = 3.0
"""Short steps are repeated for about so long: each differs from the next by what else the machine does."""
_ZERO: Final = "00" * 32
GIVES_WAY: Final = 2
_SETTLES_S: Final = 120.0
_READY: Final = "serves.json"
_CONFIG: Final = "relay.json"
_GROUP: Final = "rehearsal"
_WITHOUT: Final = "uvcc plan --no-rehearsal says what the profile alone decides"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step of three workers on ``cores`` processors of this machine.

    ``wall``: of each timed step, by the clock; ``party_cpu``: processor seconds of each party, on average;
    ``relay_cpu``: of the relay, 0 where the parties reach each other directly.
    """

    wall: tuple[float, ...]
    party_cpu: tuple[float, ...]
    relay_cpu: float
    cores: float

    def to_json(self) -> dict[str, Any]:
        """As a rehearsal's JSON has it: the median step, the quickest and the slowest tenth, and how many times as long
        the first timed ones took, which a short smoke consists of."""
        ordered = sorted(self.wall)
        tenth = len(ordered) // 10
        settled = self.wall[EARLY:] or self.wall
        return {
            "wall": statistics.median(ordered),
            "low": ordered[tenth],
            "high": ordered[-1 - tenth],
            "early": max(1.0, statistics.fmean(self.wall[:EARLY]) / statistics.median(settled)),
            "party_cpu": max(self.party_cpu),
            "all_cpu": sum(self.party_cpu) + self.relay_cpu,
            "cores": self.cores,
        }


class WaitingParties:
    """Three processes that wait to be told how many steps they train, and their relay where they need one."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind
        self._forker = multiprocessing.get_context("fork")
        self._lines: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self._relay: BaseProcess | None = None

    def _forked(self, body: Callable[..., None], *args: Any) -> BaseProcess:
        ours, theirs = self._forker.Pipe()
        process = self._forker.Process(target=body, args=(theirs, *args), daemon=True)
        process.start()
        theirs.close()
        self._lines.append(ours)
        self.processes.append(process)
        return process

    def fork(self, job: PrivateJob, model: ModelSpec, inputs: Sequence[PartyInputs]) -> None:
        """Fork them from this process, which must not have computed with several threads yet."""
        for party in range(PARTIES):
            self._forked(_serve, party, job, model, inputs[party], self._folder)
        if self._kind != "direct":
            _relay_files(self._folder)
            self._relay = self._forked(_relay, self._folder)

    def measure(self, steps: int) -> StepTimes:
        """What each of ``steps`` steps takes after a first one. Raises UvccError where a party fails."""
        links, relay_took = self._links(), -self._relay_cpu()
        for party in range(PARTIES):
            self._lines[party].send((steps + 1, links[party]))
        told = self._heard()
        relay_took += self._relay_cpu()
        return StepTimes(
            wall=tuple(b - a for a, b in pairwise(told[0]["ends"])),
            party_cpu=tuple((one["cpu"][-1] - one["cpu"][0]) / steps for one in told),
            relay_cpu=relay_took / (steps + 1),
            cores=host.cpu_limit(),
        )

    def _links(self) -> list[LinkSpec]:
        if self._relay is None:
            return _direct()
        return _relayed(self._folder, self._kind, _served_at(self._relay, self._folder / _READY))

    def _heard(self) -> list[dict[str, Any]]:
        """What each party says, the first to fail before those that wait for it."""
        found: dict[int, dict[str, Any]] = {}
        left = {self._lines[party]: party for party in range(PARTIES)}
        while left:
            for line in wait(list(left)):
                assert isinstance(line, Connection)
                party = left.pop(line)
                try:
                    found[party] = line.recv()
                except EOFError:
                    what = f"party {party} of the rehearsal ended without a word"
                    raise UvccError(what, _WITHOUT) from None
                if "error" in found[party]:
                    what = f"party {party} of the rehearsal failed: {found[party]['error']}"
                    raise UvccError(what, _WITHOUT)
        return [found[party] for party in range(PARTIES)]

    def _relay_cpu(self) -> float:
        return host.cpu_s(self._relay.pid or 0) if self._relay is not None else 0.0

    def close(self) -> None:
        """End what is still there."""
        for line in self._lines:
            line.close()
        for process in self.processes:
            process.kill()
            process.join()


def steps_for(step_s: float) -> int:
    """How many steps are timed where one takes about ``step_s`` between threads; at least two."""
    return max(2, min(MOST_STEPS, round(TIMED_S / max(step_s, 1e-3))))


@contextlib.contextmanager
def waiting(job: PrivateJob, model: ModelSpec, inputs: Sequence[PartyInputs], kind: str) -> Iterator[WaitingParties]:
    """Three processes over links of ``kind`` (one of ``LINKS``), ended afterwards."""
    with tempfile.TemporaryDirectory(prefix="uvcc-steps-") as name:
        parties = WaitingParties(Path(name), kind)
        try:
            parties.fork(job, model, inputs)
            yield parties
        finally:
            parties.close()


def _direct() -> list[LinkSpec]:
    """Each party listens at a port of its own that is free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(PARTIES)]
    at = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    others = [{str(q): at[q] for q in range(PARTIES) if q != p} for p in range(PARTIES)]
    return [LinkSpec(kind="direct", listen=at[p], peers=others[p]) for p in range(PARTIES)]


def _relay_files(folder: Path) -> None:
    """A relay's configuration, and each party's token beside it."""
    tokens = [os.urandom(16).hex() for _ in range(PARTIES)]
    allowed = [{"party": p, "group": _GROUP, "token": token} for p, token in enumerate(tokens)]
    settings = {"db": "relay.db", "ready_file": _READY, "stream_listen": "127.0.0.1:0", "credentials": allowed}
    for name, text in [(_CONFIG, json.dumps(settings)), *((f"token{p}", t) for p, t in enumerate(tokens))]:
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(text)


def _relayed(folder: Path, kind: str, at: Mapping[str, Any]) -> list[LinkSpec]:
    stream = str(at["stream"]) if kind == "stream" else ""
    common = LinkSpec(kind=kind, relay_url=str(at["url"]), group=_GROUP, stream=stream)
    return [replace(common, token_file=str(folder / f"token{p}")) for p in range(PARTIES)]


def _served_at(relay: BaseProcess, ready: Path) -> Mapping[str, Any]:
    limit = time.monotonic() + _SETTLES_S
    while not ready.exists():
        if not relay.is_alive() or time.monotonic() > limit:
            raise UvccError("the rehearsal's relay did not start", _WITHOUT)
        time.sleep(0.02)
    found: dict[str, Any] = json.loads(ready.read_text())
    return found


# -- in a party's process ---------------------------------------------------------------------------------------------


def _serve(line: Connection, party: int, job: PrivateJob, model: ModelSpec, inputs: PartyInputs, folder: Path) -> None:
    """Wait for the number of steps and the link, train, and say what it took."""
    _as_a_pod()
    try:
        steps, link = line.recv()
    except EOFError:  # nobody asks any more
        return
    try:
        torch.set_num_threads(1)  # as workers do
        keep_freed_memory()
        line.send(trained(party, replace(job, steps=steps), model, inputs, link, folder))
    except Exception as error:  # noqa: BLE001  # whatever it is, the plan says it
        line.send({"error": f"{type(error).__name__}: {error}"[:400]})


def _relay(line: Connection, folder: Path) -> None:
    """Serve until whoever forked this is gone."""
    _as_a_pod()

    def ended() -> None:
        with contextlib.suppress(EOFError):
            line.recv()
        os._exit(0)

    threading.Thread(target=ended, daemon=True).start()
    server.run(relay_config.load(folder / _CONFIG))


def _as_a_pod() -> None:
    """A session of its own, which Linux gives a share of the processors of its own, and a local pod's niceness."""
    os.setsid()
    os.nice(GIVES_WAY)


def _policy(job: PrivateJob) -> Policy:
    """Of a session that protects nothing: its keys are known."""
    named = [_identity(p).public for p in range(PARTIES)]
    return Policy.build(
        job={"kind": "private", **job.to_json()},
        model_hash=_ZERO,
        code_hash=_ZERO,
        topology=Topology(),
        parties=[PolicyParty(p, named[p], "rehearsal", "here") for p in range(PARTIES)],
        owner="rehearsal",
        commitments=[_ZERO] * PARTIES,
        reveal=list(job.reveal),
        limits={"total": 0},
        nonce=_ZERO,
    )


def _identity(party: int) -> Identity:
    return Identity(*(hashlib.sha256(f"rehearsal {use} {party}".encode()).digest() for use in ("sign", "agree")))


def trained(
    party: int, job: PrivateJob, model: ModelSpec, inputs: PartyInputs, link: LinkSpec, folder: Path
) -> dict[str, list[float]]:
    """When each step had ended, by the clock and by this process's processor time."""
    policy, mine, coord = _policy(job), _identity(party), Coord(0, party, 0, 0)
    evidence = WorkerEvidence.open(folder / f"w{party}", mine, policy, coord, resume_epoch=0)
    sid = sid_of(policy.sid_job, coord)
    plane = open_plane(
        party=party,
        coord=str(coord),
        sid_sub=sid,
        identity=mine,
        peers=policy.peers(party),
        link=link,
        recorder=evidence.recorder,
        state_dir=folder / f"plane{party}",
        on_event=lambda name, fields: None,
    )
    few = job.rounds == "few"
    rt = Runtime(party, plane, rehearsal_keys(7)[party], sid, 0, prg=job.random_generator, few_rounds=few)
    trainer = trainer_of(rt, job, model, inputs)
    if rt.ledger is not None:
        rt.ledger.defers = True
    gc.collect()
    gc.freeze()  # as a worker's process does
    found: dict[str, list[float]] = {"ends": [], "cpu": []}
    writer = RunWriter.open(folder / f"run{party}", "rehearsal", 0, str(coord))
    with Ticker(writer):
        for step in range(job.steps):
            _step(rt, trainer, evidence, plane, writer, step)
            found["ends"].append(time.monotonic())
            found["cpu"].append(time.process_time())
    plane.close()
    evidence.close()
    return found


def _step(
    rt: Runtime, trainer: PrivateTrainer, evidence: WorkerEvidence, plane: LivePlane, writer: RunWriter, step: int
) -> None:
    """What a worker's session does in a step: train, sign, agree with both peers, write its files."""
    policy, began = evidence.policy, time.monotonic()
    rt.begin_epoch(step)
    evidence.begin(step)
    writer.poll_halt()
    result = trainer.step(step)
    due = policy.step_values(step)
    revealed = {"loss": result.loss} if result.loss is not None and "loss" in due else {}
    proved = result.proved
    verdict = None if proved is None else Verdict(proved.claims, proved.digest, proved.coins, proved.drawn)
    root = evidence.finish(step, revealed, verdict)
    _agree(plane, evidence, result.owed)
    writer.event("epoch_root", **root.event(evidence.coord))
    if result.loss is not None:
        writer.metrics(step + 1, result.loss, 0.0, 0.0, 1.0 / (time.monotonic() - began))
    writer.heartbeat(step + 1, "train", sent_bytes=plane.sent_bytes)


def _agree(plane: LivePlane, evidence: WorkerEvidence, owed: OwedVerdict | None) -> None:
    """Both peers' roots of the step, and their verdicts where they are owed, as a worker hears them with the votes of
    the next."""
    peers = [p for p in range(PARTIES) if p != plane.party]
    said = b"" if owed is None else owed.said
    for peer in peers:
        plane.send_control(peer, said + evidence.agreement(peer))
    told = {peer: plane.recv_control(peer, _SETTLES_S) for peer in peers}
    if owed is not None:
        owed.hear({peer: note[: len(said)] for peer, note in told.items()})
    for peer, note in told.items():
        evidence.check(peer, note[len(said) :])
