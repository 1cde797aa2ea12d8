"""Several workers a party under ``verify: covert``: each place draws its own audits, and all openings wait for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from replica_kit import job_of, train

from uvcc_engine.contract.errors import ProofFailedError
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.proofs.audit_draws import audited

TWO = Topology(2)
FIRST = Coord(0, 0, 0, 0)


@pytest.mark.ci(__file__)
@pytest.mark.parametrize("size", [TWO, Topology(1, 2, 1, 2), Topology(1, 1, 2, 2)], ids=str)
def test_each_place_draws_its_own_audits_and_the_training_is_the_same(size: Topology) -> None:
    """Replicas, stages, tensor ranks and microbatches: two runs, one result, near the unproved one."""
    shape: dict[str, Any] = {"layers": [{"linear": 4}, "relu", "linear"], "batch": 4, "reveal": ("loss",)}
    job = job_of(verify="covert", audit_one_in=2, **shape)
    found, again, plain = train(job, size), train(job, size), train(job_of(**shape), size)
    assert set(found.errors.values()) == {None}
    for c, one in found.workers.items():
        assert one.losses == found.workers[FIRST].losses
        assert (one.coins, one.drawn) == (again.workers[c].coins, again.workers[c].drawn)
        assert one.drawn == found.workers[replace(c, party=0)].drawn
        assert all(torch.equal(one.state[name], tensor) for name, tensor in again.workers[c].state.items())
    first, other = (one.workers[FIRST].losses for one in (found, plain))
    assert np.allclose(first, other, atol=2.0**-9)  # type: ignore[arg-type]
    numbers = {n for one in found.workers.values() for of_step in one.drawn for n in of_step}
    assert len(numbers) == 3 * job.steps * size.workers_per_party


def test_a_lie_at_one_replica_ends_all_where_it_is_audited_and_nobody_where_it_is_not() -> None:
    job = job_of(["linear"], verify="covert", audit_one_in=2, steps=2, reveal=("loss",))
    place = Coord(1, 0, 0, 0)
    drawn = train(job, TWO).workers[place].drawn
    cases = {p in audited(of_step, 2): (epoch, p) for epoch, of_step in enumerate(drawn) for p in range(3)}
    assert set(cases) == {True, False}
    for due, (epoch, party) in cases.items():

        def lie(at: int, number: int, data: torch.Tensor, epoch: int = epoch) -> None:
            if at == epoch and number % 1000 == 0 and data.dtype == torch.int64:
                data.view(-1)[0] += -(2**63)

        found = train(job, TWO, stands_by=lie, liar=replace(place, party=party))
        honest = [found.errors[c] for c in TWO.coords() if c.party != party]
        if due:
            assert all(error is not None for error in honest)
            assert any(isinstance(error, ProofFailedError) and party in error.pair for error in honest)
            released = {c.party for c, _ in found.opened_in(epoch)}
            assert (party + 1) % 3 not in released, "who judges the liar released a half"
        else:
            assert honest == [None] * len(honest)
