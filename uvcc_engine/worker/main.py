"""Entry point of a secret-shared training worker: set up, run, and end so that everybody knows why."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from uvcc_engine import __version__
from uvcc_engine.contract.errors import PeerLostError, ProofFailedError, ProtocolError, UvccError
from uvcc_engine.contract.job.link_waits import patience
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.peer_protocol.peer_messages import HALT, Vote
from uvcc_engine.contract.run_files import files, flight
from uvcc_engine.contract.run_files.narrate import Narrator
from uvcc_engine.contract.run_files.waiting import Waiting
from uvcc_engine.contract.run_files.writer import RunWriter, Ticker
from uvcc_engine.mpc.kernels import threads
from uvcc_engine.mpc.kernels.compiling.loops import LOOPS
from uvcc_engine.mpc.kernels.memory import keep_freed_memory
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.parallel.party_keys import PartyKeys
from uvcc_engine.parallel.place import RankAddress
from uvcc_engine.parallel.presence import withdraw
from uvcc_engine.plane.connect import open_plane
from uvcc_engine.plane.live import LivePlane
from uvcc_engine.sealing.seeds import SEEDS, seal_seeds, seeds_name
from uvcc_engine.transcript.leaves.roots import sid_of
from uvcc_engine.transcript.signed.orders import BEAT_NAMESPACE
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy
from uvcc_engine.worker.admission import Admission, admit
from uvcc_engine.worker.compute_setup import claim_gpu, device_of, pair_keys, threads_for
from uvcc_engine.worker.consensus import PeerStoppedError, StepConsensus
from uvcc_engine.worker.late_recorder import LateRecorder
from uvcc_engine.worker.ranks import Ranks
from uvcc_engine.worker.relay_control import Orders, Roots
from uvcc_engine.worker.served_session import ServedSession
from uvcc_engine.worker.session import RunOutcome, WorkerSession

ORDER_S: Final = 15.0  # between the first party's halt and the last one's


class _StoppedAtStart(UvccError):
    """A halt or SIGTERM came before the first step."""

    def __init__(self) -> None:
        super().__init__("halted before the first step", "start it again")


def main(spec: WorkerSpec) -> int:
    """Run one worker; returns the exit code. Whatever happens, ``exit.json`` says how it ended.

    Exit codes: 0 done or halted, 2 something to configure, 3 protocol violation, 4 a peer is lost, 1 other failures.
    """
    directory = Path(spec.dir)
    keep_freed_memory()  # before there are threads
    LOOPS.compile_beside()
    with (
        RunWriter.open(directory, spec.run, spec.rank, spec.coord, lead=spec.lead) as writer,
        _termination() as terminated,
    ):
        writer.told = Narrator().tell
        writer.told("worker_start", "info", {"coord": spec.coord, "run": spec.run, "pid": os.getpid()})
        writer.heartbeat(0, "start", "checks policy and inputs")
        keys: PartyKeys | None = None
        try:
            admitted = admit(spec)
            keys = _keys_in(admitted.policy, admitted.identity, admitted.party)
            place = RankAddress.of(admitted.coord, admitted.policy.topology, os.environ)
            carried = claim_gpu(admitted, place)
            threads.use(threads_for(admitted.policy.topology))
            facts = _facts(spec, admitted)
            writer.describe(facts)
            accepted = {k: facts[k] for k in ("policy_hash", "sid_job", "code_hash", "attempt", "resume")}
            writer.told("policy_accepted", "info", accepted)
            if SEEDS in admitted.job.reveal:
                _disclose(spec, admitted)
            outcome = _connected(spec, admitted, keys, place, carried, writer, terminated)
        except UvccError as error:
            _report(writer, 0, error)
            withdraw(os.environ, error.what, keys=keys or _keys_at_hand(spec))
            return error.exit_code
        if outcome.error is not None:
            _report(writer, outcome.step, outcome.error)
            return outcome.error.exit_code
        writer.exit(outcome.status, step=outcome.step, checkpoint=outcome.checkpoint)
        return 0


def _disclose(spec: WorkerSpec, admitted: Admission) -> None:
    """Seal this session's seeds to the data owner before the first message, so that a failed run has them, too."""
    a = admitted
    sealed = Path(spec.inputs).read_bytes()
    prg = pair_keys(a)
    box = seal_seeds(a.identity, a.policy, a.coord, prg=prg, attempt=spec.attempt, sealed_inputs=sealed)
    files.write_atomic(Path(spec.dir) / seeds_name(a.coord), box)


def _keys_in(policy: Policy, identity: Identity, party: int) -> PartyKeys:
    """Who this party's pods are, as the policy names them."""
    pods = [policy.public(party, replica) for replica in range(policy.topology.replicas)]
    return PartyKeys.of(identity, pods, policy.sid_job, party, policy.topology)


def _keys_at_hand(spec: WorkerSpec) -> PartyKeys | None:
    """The same for a worker that was not admitted, if its files can be read: its sisters are to hear why."""
    try:
        identity, policy = Identity.load(Path(spec.identity_dir)), Policy.load(Path(spec.policy))
        return _keys_in(policy, identity, policy.party_of(identity.public))
    except UvccError:
        return None


def _connected(
    spec: WorkerSpec,
    admitted: Admission,
    keys: PartyKeys,
    place: RankAddress,
    carried: str,
    writer: RunWriter,
    terminated: list[int],
) -> RunOutcome:
    """Open the plane, run the session, and tell the peers if it fails. ``carried``: what the rank's groups carry."""
    recorder = LateRecorder()
    plane = open_plane(
        party=admitted.party,
        coord=spec.coord,
        sid_sub=sid_of(admitted.policy.sid_job, admitted.coord),
        identity=admitted.identity,
        peers=admitted.policy.peers(admitted.party, admitted.coord.replica),
        link=spec.link.or_else(patience(admitted.policy.topology)),
        recorder=recorder,
        state_dir=Path(spec.dir) / "plane",
        on_event=lambda name, fields: _pass_on(writer, name, fields),
        moves=Path(spec.dir) / files.LINK,
    )

    session: WorkerSession | None = None
    groups: PartyGroups | None = None
    last_words, well = "it stopped", False

    def asked_to_halt() -> bool:
        return bool(terminated) or Vote.of(writer.poll_halt()).vote == HALT

    plane.patience.asked = asked_to_halt

    def check() -> None:
        if session and session.running:
            return
        if asked_to_halt():
            raise _StoppedAtStart
        if groups is not None:
            groups.look()

    flight.provide("plane", plane.stats)
    began = round(time.time(), 3)

    def count() -> None:
        _count(writer, plane, began)

    table = StepConsensus(plane, spec.run, check=check)
    try:
        with Ticker(writer, lambda: _waiting_on(plane, groups)), _orders(spec, admitted, writer):
            groups = PartyGroups.open(
                place,
                on_event=lambda name, fields: writer.event(name, **fields),
                check=check,
                device=carried,
                keys=keys,
            )
            ranks = Ranks(groups)
            table.among_ranks = ranks.greatest
            session = (ServedSession if admitted.job.task == "serve" else WorkerSession)(
                spec,
                admitted,
                writer,
                plane,
                recorder,
                table,
                ranks,
                terminated=lambda: bool(terminated),
                sent=lambda: plane.sent_bytes,
                count=count,
            )
            outcome = session.run()
        plane.close()
        groups.close()
        well = True
        return outcome
    except UvccError as error:
        if session is not None:
            session.note_failure(error)
        reason = table.reason_of(error) if isinstance(error, PeerLostError) else error
        if _halts_as_well(reason, asked_to_halt, running=session is not None and session.running):
            reason = _StoppedAtStart()
        halted = isinstance(reason, _StoppedAtStart)
        table.tell_stopped(reason, halted=halted)
        last_words = "" if halted else reason.what  # of a halt the others are told as well
        if halted:
            return RunOutcome("halted", 0)
        return RunOutcome("failed", session.reached if session else 0, error=reason)
    except BaseException as error:
        table.tell_stopped(error)
        raise
    finally:
        try:
            if session is not None:
                close_session(session, well)
        finally:  # whatever became of this party's own files, the others hear why it stops
            plane.settle_control()  # last words may lie behind much that was under way
            plane.close(graceful=False)
            if groups is not None:
                groups.close(graceful=False, why=last_words)
            with contextlib.suppress(UvccError):  # a full disk has been told of already, by what failed
                count()


def close_session(session: WorkerSession, well: bool) -> None:
    """Close a session's files. ``well``: it has come to its end, and what its disk refuses now is what fails. Else
    something else has failed, or the same disk before: that stays the reason."""
    try:
        session.close()
    except (UvccError, OSError):
        if well:
            raise


def _halts_as_well(error: UvccError, asked_to_halt: Callable[[], bool], *, running: bool) -> bool:
    """Whether a peer was lost to a halt before the first step that this worker is asked for, too.

    Each looks for its own request once in a while, and who finds it first leaves first: of the others it is the halt
    that ends them, and not that a peer has gone. Theirs may come ``ORDER_S`` later. Not ``running``: the parties have
    not met yet.
    """
    halted = isinstance(error, PeerStoppedError) and error.halted
    if not isinstance(error, PeerLostError) or (running and not halted):
        return False
    pause, end = threading.Event(), time.monotonic() + (ORDER_S if halted else 0.0)
    while not (asked := asked_to_halt()) and time.monotonic() < end:
        pause.wait(0.1)
    return asked


def _orders(spec: WorkerSpec, admitted: Admission, writer: RunWriter) -> Orders:
    """The halt path over the relay, if this run has a relay."""
    roots = Roots()
    writer.heard = roots.note
    return Orders(
        spec.link,
        spec.run,
        spec.coord,
        Path(spec.dir),
        sign=partial(admitted.identity.sign, BEAT_NAMESPACE),
        last=lambda: writer.last_beat,
        told=lambda asked: writer.event("order_obeyed", "warn", nonce=asked.nonce, mode=asked.mode, path="relay"),
        roots=roots.listed,
    )


def _report(writer: RunWriter, step: int, error: UvccError) -> None:
    """An event by the kind of failure, ``exit.json``, and the error for whoever reads the log: what a full disk still
    takes of them. What failed is told by the exit code all the same, and not by that it could not be written."""
    name = {ProtocolError: "protocol_error", PeerLostError: "peer_lost"}
    event = next((name[kind] for kind in name if isinstance(error, kind)), "run_failed")
    fields: dict[str, Any] = {"what": error.what, "hint": error.hint}
    if isinstance(error, ProofFailedError):
        event = "proof_failed"
        fields |= {"pair": [f"P{p}" for p in error.pair], "prover": error.prover, "step": step}
        if (found := error.finding) is not None:
            fields["named"] = f"P{found.named}" if found.named >= 0 else ""
            fields["suspects"] = [f"P{p}" for p in found.own]
            fields["open_to"] = [f"P{p}" for p in found.open_to]
    elif isinstance(error, ProtocolError | PeerLostError):
        fields["party"] = error.party
    ways: list[Callable[[], object]] = [
        lambda: writer.event(event, "error", **fields),
        lambda: writer.heartbeat(step, "failed", error.what),
        lambda: writer.exit("failed", step=step, error=error),
        lambda: print(f"error: {error}", file=sys.stderr, flush=True),
    ]
    for tell in ways:
        with contextlib.suppress(UvccError, OSError):
            tell()


@contextmanager
def _termination() -> Iterator[list[int]]:
    """SIGTERM asks for a halt at the next step; yields the list that a request appends to."""
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)


def _pass_on(writer: RunWriter, name: str, fields: dict[str, Any]) -> None:
    """An event of the plane, unless it is the failure that this worker is about to end with and report itself."""
    fatal = name == "peer_lost" or (name == "protocol_error" and not fields.get("dropped"))
    if name == "waiting":
        fields = {"coord": writer.coord, **fields}
    if not fatal:
        writer.event(name, "info" if name == "link_up" else "warn", **fields)


def _count(writer: RunWriter, plane: LivePlane, began: float) -> None:
    """What the plane has counted since this process ``began``, peer by peer: who reads takes the last of each."""
    who: dict[str, Any] = {"coord": writer.coord, "began": began}
    for peer, totals in plane.totals().items():
        writer.event("plane_counters", **{**who, "peer": peer, **totals})
    if (injected := plane.injected) is not None:
        writer.event("faults_injected", "warn", **{**who, **injected})


def _waiting_on(plane: LivePlane, groups: PartyGroups | None) -> Waiting | None:
    wait = plane.waiting_on
    if wait is not None:
        return Waiting(f"p{wait['peer']}", wait["since_s"])
    return groups.waiting_on if groups is not None else None


def _facts(spec: WorkerSpec, admitted: Admission) -> dict[str, Any]:
    policy = admitted.policy
    return {
        "kind": "private",
        "version": __version__,
        "job": admitted.job.to_json(),
        "topology": asdict(spec.topology),
        "attempt": spec.attempt,
        "resume": spec.resume,
        "policy_hash": policy.hash.hex(),
        "sid_job": policy.sid_job.hex(),
        "code_hash": policy.code_hash,
        "device": device_of(admitted).type,
        "torch": torch.__version__,
        "threads": threads.allowed(),
    }
