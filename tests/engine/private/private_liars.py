"""Ways in which one party's worker can lie, once, at epoch 2. Each function patches its own process."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.peer_protocol.peer_messages import Topic
from uvcc_engine.plane.endpoint import Endpoint
from uvcc_engine.plane.live import LivePlane
from uvcc_engine.transcript.exchange.agreement import RootExchange
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.leaves.store import TranscriptStore
from uvcc_engine.transcript.signed.statements import RootStatement, sign_root
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.worker import admission
from uvcc_engine.worker.consensus import PeerSilentError, StepConsensus

EPOCH = 2
WITHHOLDS = "withholds"  # how the names of those begin that keep something back and go on living
LIMITS = {"proof_s": 500.0, "order_s": 5000.0}
"""For the links of a fleet with one of those: minutes for whoever is honest and slow; see ``gives_up``."""


def _kept_back(spec: WorkerSpec) -> Path:
    """Where a liar notes whom it does not send what, a line each."""
    return Path(spec.dir).parent.parent / "kept_back"


def _keep_back(spec: WorkerSpec, dst: int, what: Any) -> None:
    with _kept_back(spec).open("a") as out:
        out.write(json.dumps([dst, what]) + "\n")


def gives_up(spec: WorkerSpec) -> None:
    """No lie: for the others, of what a liar keeps back the limit is over, and of nothing that is merely late."""
    me, judge, hear = Coord.parse(spec.coord).party, LivePlane._judge, StepConsensus._hear_from

    def kept_back(what: Any) -> bool:
        place = _kept_back(spec)
        return place.exists() and json.dumps([me, what]) in place.read_text().split("\n")

    def judged(self: LivePlane, endpoint: Endpoint, tag: Any, start: float, now: float) -> None:
        judge(self, endpoint, tag, start - 1000.0 if tag is not None and kept_back(list(tag)) else start, now)

    def heard(self: StepConsensus, peer: int, due: Any, within_s: float) -> Any:
        while due.topic == Topic.VOTE:
            try:
                return hear(self, peer, due, 0.2)
            except PeerSilentError:
                if kept_back(due.step):
                    raise
        return hear(self, peer, due, within_s)

    LivePlane._judge = judged  # type: ignore[method-assign]
    StepConsensus._hear_from = heard  # type: ignore[method-assign,assignment]


def _flipped(payload: Any) -> bytes:
    altered = bytearray(payload)
    altered[-1] ^= 1
    return bytes(altered)


def runs_other_code(spec: WorkerSpec) -> None:
    """By what bootstrap wrote beside it."""
    site = Path(spec.dir) / "site"
    site.mkdir()
    (site / admission.CODE_HASH).write_text("f" * 64)
    defaults = admission.admit.__kwdefaults__
    assert defaults is not None
    defaults["site"] = site


def alters_an_opened_share(spec: WorkerSpec) -> None:
    """Of the loss, which is one number. The lie is recorded as sent, so the liar's own transcript shows it too."""
    honest, done = LivePlane.send, []

    def send(self: LivePlane, dst: int, tag: Any, payload: Any) -> None:
        if tag.epoch == EPOCH and tag.kind == kinds.OPEN and len(payload) == 8 and not done:
            done.append(tag)
            payload = _flipped(payload)
        honest(self, dst, tag, payload)

    LivePlane.send = send  # type: ignore[method-assign]


def alters_a_product(spec: WorkerSpec) -> None:
    """One share of a product, recorded as sent: to its peers this is a share like any other."""
    honest, done = LivePlane.send, []

    def send(self: LivePlane, dst: int, tag: Any, payload: Any) -> None:
        if tag.epoch == EPOCH and tag.kind == kinds.RESHARE and not done:
            done.append(tag)
            payload = _flipped(payload)
        honest(self, dst, tag, payload)

    LivePlane.send = send  # type: ignore[method-assign]


def stands_by_an_altered_product(spec: WorkerSpec) -> None:
    """It adds 2^63 to one entry of a product's summand, and goes on with that number itself."""
    from uvcc_engine.mpc.products import arithmetic

    honest, done = arithmetic.additive_product, []

    def altered(rt: Any, *args: Any, **kwargs: Any) -> Any:
        z, shift = honest(rt, *args, **kwargs)
        if rt.epoch == EPOCH and not done:
            done.append(shift)
            z.view(-1)[0] += -(2**63)
        return z, shift

    arithmetic.additive_product = altered


def withholds_its_proof(spec: WorkerSpec) -> None:
    """It goes on living: its links stand and answer."""
    honest = LivePlane.send

    def send(self: LivePlane, dst: int, tag: Any, payload: Any) -> None:
        if tag.epoch < EPOCH or tag.kind not in (kinds.PROOF, kinds.COIN):
            honest(self, dst, tag, payload)
        else:
            _keep_back(spec, dst, list(tag))

    LivePlane.send = send  # type: ignore[method-assign]


def withholds_its_proof_once_it_knows(spec: WorkerSpec) -> None:
    """It tells its coins and what all three drew, and nothing more of the proof."""
    honest, told = LivePlane.send, list[Any]()

    def send(self: LivePlane, dst: int, tag: Any, payload: Any) -> None:
        if tag.epoch == EPOCH and tag.kind == kinds.AUDIT:
            told.append(tag)
        elif told and tag.kind in (kinds.PROOF, kinds.COIN):
            _keep_back(spec, dst, list(tag))
            return
        honest(self, dst, tag, payload)

    LivePlane.send = send  # type: ignore[method-assign]


def withholds_its_verdict(spec: WorkerSpec) -> None:
    """It proves like the others, and keeps back the last message: its verdict, and its halves of what is opened."""
    honest, told = LivePlane.send, list[Any]()

    def send(self: LivePlane, dst: int, tag: Any, payload: Any) -> None:
        if tag.epoch == EPOCH and tag.kind in (kinds.PROOF, kinds.COIN):
            told.append(tag)
        elif told and tag.kind == kinds.OPEN:
            _keep_back(spec, dst, list(tag))
            return
        honest(self, dst, tag, payload)

    LivePlane.send = send  # type: ignore[method-assign]


def withholds_the_vote_that_its_verdict_goes_with(spec: WorkerSpec) -> None:
    """Of a step that opens nothing: it computes the next one with the others, and does not say what it found."""
    honest = LivePlane.send_control

    def send_control(self: LivePlane, dst: int, body: bytes) -> None:
        said = json.loads(body)
        if (said["topic"], said.get("step")) != (Topic.VOTE, EPOCH + 1):
            honest(self, dst, body)
        else:
            _keep_back(spec, dst, EPOCH + 1)

    LivePlane.send_control = send_control  # type: ignore[method-assign]


def proves_nothing(spec: WorkerSpec) -> None:
    """Signs a policy that has products proved, and works as one that has not."""
    from uvcc_engine.worker import main

    honest = main.admit

    def admit(spec: WorkerSpec) -> Any:
        admitted = honest(spec)
        return dataclasses.replace(admitted, job=dataclasses.replace(admitted.job, verify="off"))

    main.admit = admit  # type: ignore[assignment]


def sends_other_than_it_records(spec: WorkerSpec) -> None:
    """The wire carries an altered message, the transcript the honest one."""
    honest, done = LivePlane._queue, []

    def queue(self: LivePlane, dst: int, tag: Any, payload: Any) -> None:
        if tag.epoch == EPOCH and tag.kind == kinds.RESHARE and not done:
            done.append(tag)
            payload = _flipped(payload)
        honest(self, dst, tag, payload)

    LivePlane._queue = queue  # type: ignore[method-assign]


def omits_a_leaf(spec: WorkerSpec) -> None:
    honest, done = TranscriptStore.record, []

    def record(self: TranscriptStore, direction: int, peer: int, tag: Any, payload: Any) -> None:
        if tag.epoch == EPOCH and not done:
            done.append(tag)
            return
        honest(self, direction, peer, tag, payload)

    TranscriptStore.record = record  # type: ignore[method-assign]


def shows_its_peers_different_roots(spec: WorkerSpec) -> None:
    """Signs a second root for one peer. It holds the key, so both signatures are good."""
    identity = Identity.load(Path(spec.identity_dir))
    honest = RootExchange.message

    def message(self: RootExchange, peer: int) -> bytes:
        root, signed = self._last()
        if root.epoch != EPOCH or peer != (self._coord.party + 1) % 3:
            return honest(self, peer)
        true = RootStatement.from_json(signed.statement)
        false = dataclasses.replace(true, root=dataclasses.replace(true.root, root=bytes(32)))
        self._mine = (root, sign_root(identity, false))
        try:
            return honest(self, peer)
        finally:
            self._mine = (root, signed)

    RootExchange.message = message  # type: ignore[method-assign]


def dies_in_an_epoch(spec: WorkerSpec) -> None:
    """No lie: a pod that loses its power while the epoch is open, with some of its messages noted."""
    honest, sent = LivePlane.send, []

    def send(self: LivePlane, dst: int, tag: Any, payload: Any) -> None:
        if tag.epoch == EPOCH:
            sent.append(tag)
            if len(sent) > 6:
                os.kill(os.getpid(), signal.SIGKILL)
        honest(self, dst, tag, payload)

    LivePlane.send = send  # type: ignore[method-assign]
