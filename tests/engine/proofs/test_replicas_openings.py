"""How a party of several workers opens something under proofs: in halves beside the verdicts, to all or to nobody."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from proof_kit import alter
from replica_kit import Outcome, job_of, train

from uvcc_engine.contract.errors import ProofFailedError
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.plane.api import Tag
from uvcc_engine.proofs.settling import VERDICT_BYTES
from uvcc_engine.transcript.formats import kinds

TWO = Topology(2)
JOB: dict[str, Any] = {"layers": ["linear"], "reveal": ("loss",), "steps": 2}
HALF = 8 * (1 + 4) + 32  # a loss, the bits of the half's own, and the hash of the other half


class _Seen:
    """Every message, and a lie in the first one of a worker in a step, which goes on with it."""

    def __init__(self, liar: Coord | None = None, epoch: int = 0) -> None:
        self.messages: list[tuple[Coord, int, Tag, bytes]] = []
        self.liar, self._epoch, self.lied = liar, epoch, False

    def tamper(self, c: Coord, dst: int, tag: Tag, body: bytes) -> bytes:
        self.messages.append((c, dst, tag, body))
        return body

    def lie(self, epoch: int, number: int, data: torch.Tensor) -> None:
        if epoch == self._epoch and not self.lied:
            self.lied = True
            alter(data, "random", random.Random(1))

    def train(self, size: Topology = TWO, **more: Any) -> Outcome:
        layers = {"layers": [{"linear": 2}, "relu", "linear"]} if size.stages > 1 else {}
        job = job_of(verify="proofs", **(JOB | layers | more.pop("job", {})))
        return train(job, size, tamper=self.tamper, stands_by=self.lie, liar=self.liar, **more)

    def last(self, c: Coord, dst: int, epoch: int) -> tuple[int, bytes]:
        """Kind and body of the last message of a proof from one worker to another."""
        tag, body = max((t, b) for src, to, t, b in self.messages if (src, to, t.epoch, t.stream) == (c, dst, epoch, 0))
        return tag.kind, body


@pytest.mark.parametrize(
    "size",
    [TWO, *(pytest.param(s, marks=pytest.mark.ci(__file__)) for s in (Topology(1, 2), Topology(1, 1, 2)))],
    ids=str,
)
def test_a_party_of_several_workers_opens_in_the_round_of_its_verdicts(size: Topology) -> None:
    seen = _Seen()
    found = seen.train(size)
    assert set(found.errors.values()) == {None}
    openers = {c for c, _ in found.opened}
    assert len(openers) == 3, "one worker of each party opens"
    for c in size.coords():
        for dst in {0, 1, 2} - {c.party}:
            kind, body = seen.last(c, dst, 0)
            expected = (kinds.OPEN, VERDICT_BYTES + HALF) if c in openers else (kinds.PROOF, VERDICT_BYTES)
            assert (kind, len(body)) == expected, "the verdict had a round before what is opened"


def test_a_fault_at_one_place_keeps_its_judge_s_party_from_releasing_at_another() -> None:
    """The opener's own place has no fault: it hears of the other one within its party, before it sends."""
    for party in range(3):
        seen = _Seen(Coord(1, party, 0, 0))
        found = seen.train()
        judge, other = (party + 1) % 3, (party + 2) % 3
        released = {
            (src, dst): any(seen.last(Coord(0, src, 0, 0), dst, 0)[1][VERDICT_BYTES:])
            for src in (judge, other)
            for dst in {0, 1, 2} - {src}
        }
        assert not released[judge, party]
        assert not released[judge, other]
        assert released[other, party], "who has not heard of it releases a half, which tells nothing by itself"
        assert seen.last(Coord(0, judge, 0, 0), other, 0)[1][:VERDICT_BYTES][judge - 1] == 1, "its own place held"
        for c, one in found.workers.items():
            assert one.losses == []
            if c.party != party:
                assert isinstance(one.error, ProofFailedError)
                assert party in one.error.pair


@pytest.mark.parametrize(
    "size",
    [
        TWO,
        pytest.param(Topology(1, 2, 1, 2), marks=pytest.mark.ci(__file__)),
        pytest.param(Topology(1, 1, 2), marks=pytest.mark.ci(__file__)),
    ],
    ids=str,
)
def test_a_step_that_opens_nothing_has_no_round_for_its_verdicts_and_learns_the_same(size: Topology) -> None:
    job = {"loss_every": 2, "steps": 3, "batch": 4}
    seen = _Seen()
    later, at_once = seen.train(size, job=job, defers=True), _Seen().train(size, job=job)
    assert set(later.errors.values()) == {None}
    for c, one in later.workers.items():
        other = at_once.workers[c]
        assert (one.losses, one.metrics, one.claims) == (other.losses, other.metrics, other.claims)
        assert one.losses[1] is None
        assert all(torch.equal(one.state[name], tensor) for name, tensor in other.state.items())
    silent = [body for _, _, tag, body in seen.messages if tag.epoch == 1 and tag.kind == kinds.PROOF]
    assert silent
    assert not [body for body in silent if len(body) == VERDICT_BYTES]


@pytest.mark.parametrize(
    "liar",
    [
        Coord(1, 0, 0, 0),
        pytest.param(Coord(0, 1, 0, 0), marks=pytest.mark.ci(__file__)),
        pytest.param(Coord(1, 2, 0, 0), marks=pytest.mark.ci(__file__)),
    ],
    ids=str,
)
def test_a_lie_in_a_silent_step_ends_all_workers_before_anything_of_the_next_is_opened(liar: Coord) -> None:
    seen = _Seen(liar, 1)
    found = seen.train(job={"loss_every": 2, "steps": 3}, defers=True)
    assert seen.lied
    assert not [one for one in found.opened if one[1] > 0]
    for c, one in found.workers.items():
        assert len(one.losses) == 2, c
        if c.party != liar.party:
            assert isinstance(one.error, ProofFailedError), (c, one.error)
            assert liar.party in one.error.pair
            assert "step 1" in one.error.what
