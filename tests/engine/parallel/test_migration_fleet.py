"""Going on from a committed checkpoint under another policy: other topologies, a lost pod, and what is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from uvcc_engine.bench.launch.fleet import Fleet, Forker, pod_identity, until
from uvcc_engine.checkpoint.encryption import decrypt, rest_key, state_name
from uvcc_engine.checkpoint.migration_target import about_box, read_migrated
from uvcc_engine.checkpoint.reshard import cut_state, join_state
from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError, VerificationError
from uvcc_engine.contract.job.migration import Migration
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.sealing.box import seal
from uvcc_engine.sealing.components import encode_component
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.migration_plan import migration_after
from uvcc_engine.worker.checkpoints import about
from uvcc_engine.worker.migration_source import remember

SIZE = Topology(1, 2, 1, 2)
JOB = PrivateJob(steps=6, batch=16, checkpoint_every=2, test_rows=40)
AT = 4
ALL = [(0, 0), (1, 0), (2, 0)]
NEAR = 16 * 2.0**-16  # what the rounding of a few updates comes to: every truncation is off by one unit at most
Keys = Callable[[int, int], Identity]


def commit(fleet: Fleet, step: int = AT, party: int = 0) -> dict[str, Any]:
    folder = ck.step_dir(fleet.dir(Coord(0, party, 0, 0)) / "checkpoints", step)
    return dict(json.loads((folder / "COMMIT.json").read_text()))


def successor(
    folder: Path, forker: Forker, old: Fleet, size: Topology, keys: Keys = pod_identity, **changes: Any
) -> Fleet:
    job = replace(JOB, batch=JOB.batch // size.replicas, **changes)
    return Fleet(folder, forker, job, size, keys=keys, goes_on=lambda p: migration_after(old.policy, commit(old), p))


def end(fleet: Fleet, keys: Keys = pod_identity) -> dict[str, np.ndarray]:
    """The whole state in clear, from the last checkpoint of the first replica's three pods."""
    parts: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    for c in (c for c in fleet.coords if c.replica == 0):
        rank, key = fleet.size.local_rank(c), rest_key(keys(c.party, 0), fleet.policy.sid_job)
        sealed = (ck.step_dir(fleet.dir(c) / "checkpoints", JOB.steps) / state_name(rank)).read_bytes()
        mine = parts.setdefault((c.stage, c.tensor), {})
        for name, value in load(decrypt(key, sealed, about(str(c), JOB.steps))).items():
            if name.endswith(".lo"):
                mine[name[:-3]] = mine.get(name[:-3], 0) + value
    joined = join_state(find_model(JOB.model), fleet.size, parts)
    return {name: value / 2.0**JOB.frac_bits for name, value in joined.items()}


def farthest(fleet: Fleet, whole: Fleet, keys: Keys = pod_identity) -> float:
    one, two = end(fleet, keys), end(whole)
    assert one.keys() == two.keys()
    return max(float(np.abs(one[name] - two[name]).max()) for name in one)


def run_on(fleet: Fleet, old: Fleet, pods: list[tuple[int, int]]) -> None:
    assert set(old.hand_over(fleet, AT, pods).values()) == {0}, old.logs()
    fleet.launch()
    assert set(fleet.wait().values()) == {0}, fleet.logs()
    assert len(fleet.hashes()) == 1
    assert {e["step"] for c in fleet.coords for e in fleet.events(c, "taken_over")} == {AT}


@pytest.mark.parametrize(
    "size",
    [pytest.param(Topology(1, 1, 2, 1), marks=pytest.mark.ci(__file__)), Topology(2, 1, 1, 2), Topology()],
    ids=str,
)
def test_a_run_goes_on_under_another_topology(forker: Forker, whole: Fleet, tmp_path: Path, size: Topology) -> None:
    fleet = successor(tmp_path / "fleet", forker, whole, size)
    run_on(fleet, whole, ALL)
    assert farthest(fleet, whole) < NEAR
    certificate = fleet.verified(tmp_path / "bundle")
    assert certificate.epochs == JOB.steps - AT + 1


def moved(party: int, replica: int) -> Identity:
    """The identities once P1's pod was lost and another came in its place."""
    if party != 1:
        return pod_identity(party, replica)
    seed = hashlib.sha256(b"another machine").digest()
    return Identity(seed, hashlib.sha256(seed).digest())


def test_a_lost_pod_is_replaced_and_gets_its_shares_from_the_other_parties(
    forker: Forker, whole: Fleet, tmp_path: Path
) -> None:
    fleet = successor(tmp_path / "fleet", forker, whole, SIZE, moved)
    assert fleet.policy.migration is not None
    assert fleet.policy.migration.restored == (1,)
    run_on(fleet, whole, [(0, 0), (2, 0)])
    made = sorted(p.name for p in (fleet.dir(Coord(0, 1, 0, 0)) / "start").glob("*.box"))
    assert made == ["c1_p1r0_by_p0r0.box", "c2_p1r0_by_p2r0.box"]
    assert farthest(fleet, whole, moved) < NEAR
    fleet.launch(resume=True)  # its own checkpoints resume as any other's
    assert set(fleet.wait().values()) == {0}, fleet.logs()


@pytest.mark.ci(__file__)
def test_a_successor_that_is_killed_resumes_to_the_same_end(forker: Forker, whole: Fleet, tmp_path: Path) -> None:
    size = Topology(1, 1, 2, 1)
    calm = successor(tmp_path / "calm", forker, whole, size, checkpoint_every=1)
    run_on(calm, whole, ALL)
    rough = successor(tmp_path / "rough", forker, whole, size, checkpoint_every=1)
    whole.hand_over(rough, AT, ALL)
    rough.launch()
    victim = Coord(0, 2, 0, 1)
    until(lambda: rough.events(victim, "checkpoint_written"), 500, "the first checkpoint")
    rough.end()
    rough.launch(resume=True)
    assert set(rough.wait().values()) == {0}, rough.logs()
    assert rough.hashes() == calm.hashes()
    for c in calm.coords:
        assert rough.events(c, "epoch_root")[-1] == calm.events(c, "epoch_root")[-1]


def test_an_altered_box_another_job_and_a_missing_component_are_refused(
    forker: Forker, whole: Fleet, tmp_path: Path
) -> None:
    fleet = successor(tmp_path / "fleet", forker, whole, SIZE, moved)
    assert set(whole.hand_over(fleet, AT, [(0, 0), (2, 0)]).values()) == {0}
    start, policy, worker = fleet.dir(Coord(0, 1, 0, 0)) / "start", fleet.policy, Coord(0, 1, 1, 0)

    def taken(job: PrivateJob = fleet.job) -> set[str]:
        assert policy.migration is not None
        return set(read_migrated(start, policy.migration, policy, moved(1, 0), worker, job))

    assert taken() == {"weight.1.lo", "weight.1.hi", "velocity.1.lo", "velocity.1.hi"}
    with pytest.raises(ConfigError, match=r"job.lr is 0.25, the checkpoint is of 0.5"):
        taken(replace(fleet.job, lr=0.25))
    with pytest.raises(ConfigError, match="steps of 8 rows, not of 16"):
        taken(replace(fleet.job, batch=8))
    box = start / "c1_p1r0_by_p0r0.box"
    kept = box.read_bytes()
    box.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    with pytest.raises(VerificationError, match="was altered"):
        taken()
    box.write_bytes(lie(fleet))
    with pytest.raises(VerificationError, match="component 1 is not the one that the parties committed"):
        taken()
    box.unlink()
    with pytest.raises(UnreadableError, match="no box with component 1 for p1r0"):
        taken()
    (start / "c1_p1r0_by_p2r0.box").write_bytes(kept)
    with pytest.raises(VerificationError, match="by another sender"):
        taken()
    (start / "COMMIT.json").write_text(json.dumps(commit(whole, 2)))
    with pytest.raises(VerificationError, match="another policy or COMMIT record"):
        taken()


def lie(fleet: Fleet) -> bytes:
    """Component 1 as P0 would have it: a box of the right form with other numbers."""
    tensors = {f"s{n}t0/{kind}.{n}": np.zeros((2, 2), np.int64) for kind in ("weight", "velocity") for n in (0, 1)}
    plain = bytes(32) + encode_component(1, JOB.frac_bits, tensors)
    to = moved(1, 0).public.x25519
    return seal(plain, sender=pod_identity(0, 0), to=to, about=about_box(fleet.policy, 1, AT))


def test_a_handover_only_to_the_policy_that_starts_there(forker: Forker, whole: Fleet, tmp_path: Path) -> None:
    elsewhere = Fleet(
        tmp_path / "elsewhere",
        forker,
        JOB,
        SIZE,
        goes_on=lambda p: replace(migration_after(whole.policy, commit(whole), p), commit="0" * 64),
    )
    assert set(whole.hand_over(elsewhere, AT, [(0, 0)]).values()) == {2}
    assert "does not start from step 4" in whole.logs()
    silent = Fleet(
        tmp_path / "silent",
        forker,
        JOB,
        SIZE,
        keys=moved,
        goes_on=lambda p: replace(migration_after(whole.policy, commit(whole), p), restored=()),
    )
    assert set(whole.hand_over(silent, AT, [(0, 0)]).values()) == {2}


def test_one_party_of_a_lineage_is_restored_and_no_second(whole: Fleet, tmp_path: Path) -> None:
    start = Migration("a" * 64, 2, "b" * 64, "c" * 64, (1,))
    with pytest.raises(ConfigError, match="handed to identities"):
        replace(start, restored=(0, 1))
    for _ in range(2):
        remember(tmp_path, start)
    remember(tmp_path, replace(start, root="d" * 64, restored=(2,)))
    with pytest.raises(ProtocolError, match="P1's shares in this chain of migrations; P0's would complete"):
        remember(tmp_path, replace(start, restored=(0,)))


def test_a_state_survives_any_way_of_cutting_and_what_does_not_fit_is_refused() -> None:
    model, rng = find_model("gpt-tiny"), np.random.default_rng(3)
    state = {f"weight.{n}": rng.integers(-99, 99, w.weight_shape) for n, w in enumerate(model.weights)}
    for size in (Topology(1, 2, 2), Topology(1, 1, 2), Topology(1, 3, 1)):
        parts = {(s, t): cut_state(model, size, s, t, state) for s in range(size.stages) for t in range(size.tensor)}
        joined = join_state(model, size, parts)
        assert joined.keys() == state.keys()
        assert all(np.array_equal(joined[name], state[name]) for name in state)
    with pytest.raises(ConfigError, match="tensor ranks"):
        cut_state(model, Topology(1, 1, 64), 0, 0, state)
    with pytest.raises(ConfigError, match="stages"):
        cut_state(model, Topology(1, 64, 1), 0, 0, state)
