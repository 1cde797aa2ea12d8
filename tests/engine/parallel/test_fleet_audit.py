"""The owner's replay of a run on many workers: an honest one holds, and whoever altered one record is named, alone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from uvcc_engine.bench.launch.fleet import OWNER, Fleet, Forker
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.owner import audit as owners_audit
from uvcc_engine.owner.audit import judge_fleet
from uvcc_engine.owner.client import sealed_name
from uvcc_engine.transcript.leaves.leaf import RECEIVED, SENT, Leaf

JOB = PrivateJob(
    model="mlp-digits",
    steps=4,
    batch=8,
    lr=8.0,
    test_rows=8,
    val_rows=8,
    val_every=1,
    patience=1,
    reveal=("loss", "accuracy", "val_loss", "seeds"),
)
"""A rate so high that its second validation ends it."""


@pytest.mark.parametrize(
    "size", [pytest.param(Topology(2, 2, 1, 2), marks=pytest.mark.ci(__file__)), Topology(1, 1, 2, 1)], ids=str
)
def test_a_run_on_every_kind_of_workers_is_as_the_program_computes_it(
    forker: Forker, tmp_path: Path, size: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path / "fleet", forker, JOB, size)
    fleet.launch()
    assert set(fleet.wait().values()) == {0}, fleet.logs()
    sealed = tmp_path / "sealed"
    sealed.mkdir()
    for p in range(3):
        for r in range(size.replicas):
            shutil.copy(fleet.home(p, r) / "inputs", sealed / sealed_name(p, r))
    policy = fleet.home(0) / "policy.json"
    kept: list[tuple[dict, dict]] = []
    judge = judge_fleet

    def judged(epoch: int, program: dict, found: dict) -> owners_audit.Audit | None:
        kept.append((program, found))
        return judge(epoch, program, found)

    monkeypatch.setattr(owners_audit, "judge_fleet", judged)
    found = owners_audit.audit(tmp_path / "fleet", OWNER, sealed, policy)
    assert found.parties == ()
    assert found.epochs == 2 + 1 < JOB.steps + 1  # it ended early, and so did the program
    assert found.messages > 100
    _whoever_alters_a_record_is_named(*kept[1], Coord(size.replicas - 1, 1, size.stages - 1, size.tensor - 1))


def _whoever_alters_a_record_is_named(program: dict, found: dict, liar: Coord) -> None:
    """As if P1's last worker had sent another share: its peer and all that follow are honest."""
    (_, sent) = next(one for one in program[liar] if Leaf.unpack(one[1]).direction == SENT)
    leaf = Leaf.unpack(sent)
    peer = replace(liar, party=leaf.dst)
    after = next(
        at for at, record in program[peer] if Leaf.unpack(record).key == (*leaf.key[:3], RECEIVED, *leaf.key[4:])
    )

    def altered(c: Coord, from_: int) -> tuple[dict, bool]:
        records = {Leaf.unpack(r).key: r for _, r in program[c]}
        for at, record in program[c]:
            if at >= from_:  # whatever it did from then on followed from the lie
                one = Leaf.unpack(record)
                records[one.key] = one._replace(digest=bytes(32)).pack()
        return records, True

    told = next(at for at, record in program[liar] if record == sent)
    lied = {**found, liar: altered(liar, told), peer: altered(peer, after)}
    sisters = [c for c in program if c.party == leaf.dst and c != peer]
    lied |= {c: altered(c, after) for c in sisters}  # what its receiver told its own party's workers spread
    verdict = judge_fleet(1, program, lied)
    assert verdict is not None
    assert verdict.parties == (1,)
    assert str(liar) in verdict.what
    one_end = {**found, peer: altered(peer, after)}
    assert judge_fleet(1, program, one_end).parties == tuple(sorted((1, leaf.dst)))
    short = {
        c: ({k: r for n, (k, r) in enumerate(records.items()) if n < 5}, False) for c, (records, _) in found.items()
    }
    assert judge_fleet(1, program, short) is None  # an epoch that was cut short says nothing against anybody
