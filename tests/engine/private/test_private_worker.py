"""Workers as real processes: done, held, halted, resumed, killed, refused; over direct links and over the relay."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from private_kit import CODE, OWNER, PARTIES, SOON_LOST, Fleet, Zygote, direct_links, relay_links, until

from uvcc_engine import simulate
from uvcc_engine.checkpoint.commits import RECORDS, check_record, read_record
from uvcc_engine.checkpoint.encryption import decrypt, rest_key, state_name
from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.errors import VerificationError
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.run_files.control import HALT, HOLD, RELEASE, HaltRequest, write_halt
from uvcc_engine.data.sets import load_digits
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.learning.plaintext import count_correct, train_plaintext
from uvcc_engine.mpc.foundation.prg import PairKeys
from uvcc_engine.owner import client
from uvcc_engine.sealing.release import open_weights
from uvcc_engine.transcript.leaves.roots import sid_of
from uvcc_engine.transcript.proof.bundle import assemble_folder, read_bundle
from uvcc_engine.transcript.proof.revealed_series import revealed_series
from uvcc_engine.transcript.proof.verifier import verify
from uvcc_engine.transcript.terms.policy import Policy, sign_policy, write_signatures

JOB = PrivateJob(steps=12, batch=16, checkpoint_every=5, test_rows=100, reveal=("loss", "accuracy", "weights"))


@pytest.fixture(scope="module")
def whole(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """A run that nothing disturbed: what the others must equal."""
    fleet = Fleet(tmp_path_factory.mktemp("whole"), zygote, JOB, direct_links())
    fleet.launch()
    assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    return fleet


@pytest.fixture(params=["direct", pytest.param("relay", marks=pytest.mark.slow)])
def links_to_kill(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[dict[str, Any]]]:
    yield from _links(request.param, tmp_path)


@pytest.fixture(params=["direct", pytest.param("relay", marks=pytest.mark.ci(__file__))])
def links(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[dict[str, Any]]]:
    yield from _links(request.param, tmp_path)


def _links(kind: str, folder: Path) -> Iterator[list[dict[str, Any]]]:
    if kind == "direct":
        yield direct_links()
    else:
        with relay_links(folder) as found:
            yield found


def halt(fleet: Fleet, party: int, mode: str, nonce: str = "n1") -> None:
    write_halt(fleet.dir(party), HaltRequest(mode, nonce, fleet.run))


def steps_done(fleet: Fleet, party: int) -> int:
    return len(fleet.roots(party))


def assert_same_result(fleet: Fleet, whole: Fleet) -> None:
    for p in range(3):
        assert fleet.result(p)["result_hash"] == whole.result(0)["result_hash"]
        assert fleet.roots(p) == whole.roots(p)
        assert [line.split(",")[:3] for line in fleet.csv(p)] == [line.split(",")[:3] for line in whole.csv(p)]


def test_a_whole_run_agrees_and_leaves_its_files(whole: Fleet) -> None:
    results = [whole.result(p) for p in range(3)]
    assert len({r["result_hash"] for r in results}) == 1
    assert results[0]["values"] == results[2]["values"]
    assert set(results[0]["values"]) == {"loss", "accuracy"}
    assert 0.5 < results[0]["values"]["accuracy"] <= 1.0
    for p in range(3):
        assert whole.exit(p)["status"] == "done"
        assert whole.exit(p)["step"] == 12
        assert len(whole.csv(p)) == 13
        assert sorted(whole.roots(p)) == list(range(13))  # one epoch per step, one for the result
        assert ck.steps_present(whole.dir(p) / "checkpoints") == [10, 5]
        ck.verify(whole.dir(p) / "checkpoints" / "step-10")
    mine = {(e["epoch"], 1): e["pairs"]["p1r0s0t0"] for e in whole.events(0, "epoch_root")}
    theirs = {(e["epoch"], 1): e["pairs"]["p0r0s0t0"] for e in whole.events(1, "epoch_root")}
    assert mine == theirs


def test_a_simulation_with_the_keys_of_a_run_has_its_numbers_bit_for_bit(whole: Fleet) -> None:
    boxes = [(whole.dir(p) / f"result_p{p}r0s0t0.box").read_bytes() for p in range(3)]
    theirs = open_weights(boxes, owner=OWNER, parties=[p.public for p in PARTIES])
    first, second, third = (keys_of(whole.policy, p) for p in range(3))
    keys = simulate.SessionKeys((first, second, third), sid_of(whole.policy.sid_job, Coord(0, 0, 0, 0)))
    data = load_digits(JOB.seed, JOB.test_rows)
    ours = simulate.train(JOB, data, keys=keys)
    assert [w.shape for w in ours.weights] == [w.shape for w in theirs.values()]
    assert all(np.array_equal(w, theirs[f"weight.{i}"]) for i, w in enumerate(ours.weights))
    values = whole.result(0)["values"]
    assert (ours.accuracy, ours.losses[-1]) == (values["accuracy"], values["loss"])
    beats = [whole.dir(p) / "heartbeat_rank0.jsonl" for p in range(3)]  # what a plan is scored by
    told = [json.loads(path.read_text().splitlines()[-1]) for path in beats]
    rounds, sent = np.mean(ours.step_costs[1:], axis=0)
    assert [beat["step_rounds"] for beat in told] == pytest.approx([rounds] * 3, abs=1e-3)
    assert sum(beat["step_bytes"] for beat in told) == pytest.approx(sent, abs=1)
    other = simulate.train(JOB, data)  # other keys round otherwise, and not far off
    assert not all(np.array_equal(w, theirs[f"weight.{i}"]) for i, w in enumerate(other.weights))
    assert np.allclose(ours.losses, other.losses, atol=5e-3)


def keys_of(policy: Policy, party: int) -> PairKeys:
    """What the party derives from its identity and the policy."""
    one, peers, job = PARTIES[party], policy.peers(party, 0), policy.sid_job
    return PairKeys(
        prev=one.pair_secret(peers[(party + 2) % 3], job, "prg"),
        next=one.pair_secret(peers[(party + 1) % 3], job, "prg"),
        own=one.own_secret(job, "prg"),
    )


def test_the_evidence_of_a_run_verifies(whole: Fleet, tmp_path: Path) -> None:
    for p in range(3):
        shutil.copytree(whole.dir(p) / f"transcript_p{p}r0s0t0", tmp_path / f"transcript_p{p}r0s0t0")
    shutil.copy(whole.home(0) / "policy.json", tmp_path / "policy.json")
    shutil.copy(whole.home(0) / "signatures.json", tmp_path / "policy_signatures.json")
    bundle = assemble_folder(tmp_path)
    certificate = verify(bundle)
    assert certificate.to_json()["result_hashes"] == [whole.result(0)["result_hash"]]
    losses = revealed_series(read_bundle(bundle))["loss"]
    assert [step for step, _ in losses] == list(range(1, JOB.steps + 1))
    assert losses[-1][1] == whole.result(0)["values"]["loss"]
    for p in range(3):
        table = [line.split(",")[:2] for line in whole.csv(p)[1:]]
        assert table == [[str(step), f"{loss:.9g}"] for step, loss in losses]


def test_every_commit_record_stays_with_the_evidence_and_checks(whole: Fleet) -> None:
    policy = Policy.load(whole.home(0) / "policy.json")
    for p in range(3):
        records = [json.loads(line) for line in (whole.dir(p) / RECORDS).read_text().splitlines()]
        assert [r["step"] for r in records] == [5, 10]
        written = {e["step"]: e["sha256"] for e in whole.events(p, "checkpoint_written")}
        for record in records:
            assert check_record(record, policy)[p]["manifest"] == written[record["step"]]
            record["parties"][p]["manifest"] = "00" * 32
            with pytest.raises(VerificationError, match="did not sign"):
                check_record(record, policy)


def test_the_plane_tells_what_it_counted_at_checkpoints_and_at_the_end(whole: Fleet) -> None:
    for p in range(3):
        told = whole.events(p, "plane_counters")
        peers = [q for q in range(3) if q != p]
        assert [e["peer"] for e in told] == peers * (len(told) // 2)  # and every ten seconds
        assert len(told) >= 2 * 3
        assert all(e["waited_ms"] >= 0 and e["round_trip_us"] > 0 for e in told)
        for peer in {e["peer"] for e in told}:
            line = [e["messages"] for e in told if e["peer"] == peer]
            assert line == sorted(line)
            assert line[-1] > 0
        assert not whole.events(p, "faults_injected")


def test_the_owner_and_nobody_else_opens_the_final_weights(whole: Fleet) -> None:
    boxes = [(whole.dir(p) / f"result_p{p}r0s0t0.box").read_bytes() for p in range(3)]
    public = [p.public for p in PARTIES]
    weights = open_weights(boxes, owner=OWNER, parties=public)
    data = load_digits(JOB.seed, JOB.test_rows)
    clear = train_plaintext(JOB, data)
    for i, exact in enumerate(clear.weights):
        assert np.abs(weights[f"weight.{i}"] - exact).max() < 0.02
    correct = count_correct(find_model(JOB.model), [weights["weight.0"], weights["weight.1"]], data)
    assert correct / JOB.test_rows == whole.result(0)["values"]["accuracy"]
    with pytest.raises(VerificationError, match="another recipient"):
        open_weights(boxes, owner=PARTIES[0], parties=public)


def test_a_checkpoint_holds_two_components_of_the_state_and_parties_share_one(whole: Fleet) -> None:
    from safetensors.torch import load

    sid, about = whole.policy.sid_job, "p{}r0s0t0 at step 10"
    sealed = [(whole.dir(p) / "checkpoints" / "step-10" / state_name(0)).read_bytes() for p in range(3)]
    states = [load(decrypt(rest_key(PARTIES[p], sid), sealed[p], about.format(p))) for p in range(3)]
    with pytest.raises(VerificationError, match="does not open under this pod's key"):
        decrypt(rest_key(PARTIES[1], sid), sealed[0], about.format(0))
    for p in range(3):
        commit = read_record(whole.dir(p) / "checkpoints" / "step-10", whole.policy)
        assert [c["coord"] for c in commit["parties"]] == ["p0r0s0t0", "p1r0s0t0", "p2r0s0t0"]
        for name in ("weight.0", "velocity.1"):
            assert states[p][f"{name}.hi"].equal(states[(p + 1) % 3][f"{name}.lo"])
            assert not states[p][f"{name}.lo"].equal(states[p][f"{name}.hi"])


def held_of_all(fleet: Fleet, step: int, **how: Any) -> dict[str, Any]:
    """Start the workers with a hold lying at P2, which is met after one step; what all three say of it."""
    fleet.launch(halt=HOLD, **how)

    def said(party: int) -> list[dict[str, Any]]:
        return [e for e in fleet.events(party, "held") if e["step"] == step]

    found = [until(lambda p=p: said(p), 500, f"P{p}'s hold")[0] for p in range(3)]
    until(lambda: '"hold"' in (fleet.dir(0) / "heartbeat_rank0.jsonl").read_text(), 500, "a heartbeat")
    assert found[0] == found[1] == found[2]
    return dict(found[0])


def test_halt_stops_all_at_one_step_and_resume_ends_in_the_same_result(
    whole: Fleet, zygote: Zygote, tmp_path: Path, links: list[dict[str, Any]]
) -> None:
    fleet = Fleet(tmp_path / "fleet", zygote, JOB, links)
    for step, halting in ((1, 1), (2, 0)):
        assert held_of_all(fleet, step, resume=step > 1) == {"nonce": "early", "step": step}
        halt(fleet, halting, HALT)
        assert fleet.wait() == [0, 0, 0]
        for p in range(3):
            manifest = ck.verify(fleet.dir(p) / "checkpoints" / f"step-{step}")
            end = fleet.exit(p)
            assert (end["status"], end["step"], end["checkpoint"]) == ("halted", step, manifest.sha256)
            assert fleet.events(p, "halted")[-1] == {"nonce": "n1", "step": step, "checkpoint": manifest.sha256}
            assert not (fleet.dir(p) / "result.json").exists()
    fleet.launch(resume=True)
    assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    assert [e["step"] for e in fleet.events(0, "resumed")] == [1, 2]
    assert_same_result(fleet, whole)


@pytest.mark.ci("tests/engine/private/test_standardising.py")
def test_columns_standardised_under_sharing_go_on_after_a_halt_and_are_told_to_the_owner(
    zygote: Zygote, tmp_path: Path
) -> None:
    job = replace(JOB, steps=3, standardise=True, reveal=(*JOB.reveal, "statistics"))
    once, halted = (Fleet(tmp_path / name, zygote, job, direct_links()) for name in ("once", "halted"))
    once.launch()
    assert once.wait() == [0, 0, 0], [once.exit(p) for p in range(3)]
    held_of_all(halted, 1)
    halt(halted, 1, HALT)
    assert halted.wait() == [0, 0, 0]
    halted.launch(resume=True)
    assert halted.wait() == [0, 0, 0], [halted.exit(p) for p in range(3)]
    assert_same_result(halted, once)
    for p in range(3):
        (tmp_path / "boxes").mkdir(exist_ok=True)
        shutil.copy(once.dir(p) / f"result_p{p}r0s0t0.box", tmp_path / "boxes")
    OWNER.store(tmp_path / "owner")
    (tmp_path / "parties.json").write_text(json.dumps([p.public.to_json() for p in PARTIES]))
    folders = ["--open", str(tmp_path / "boxes"), "--owner", str(tmp_path / "owner"), "--out", str(tmp_path / "out")]
    assert client.main([*folders, "--parties", str(tmp_path / "parties.json")]) == 0
    with np.load(tmp_path / "out" / owner_files.STATISTICS) as found:
        x = load_digits(job.seed, job.test_rows).train_x
        assert np.abs(found["mean"] - x.mean(0)).max() < 1e-3
        assert np.abs(found["deviation"] - np.sqrt(x.var(0) + 2.0**-10)).max() < 2e-3
    with np.load(tmp_path / "out" / owner_files.WEIGHTS) as found:
        assert set(found) == {"weight.0", "weight.1"}


def test_a_hold_at_one_party_holds_all_until_its_release(whole: Fleet, zygote: Zygote, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, zygote, JOB, direct_links())
    assert held_of_all(fleet, 1) == {"nonce": "early", "step": 1}
    beats = (fleet.dir(0) / "heartbeat_rank0.jsonl").read_text().splitlines()
    assert any('"phase":"hold"' in beat and '"halt_nonce":"early"' in beat for beat in beats)
    assert [steps_done(fleet, p) for p in range(3)] == [1, 1, 1]
    halt(fleet, 2, RELEASE, "early")
    assert fleet.wait() == [0, 0, 0]
    assert [fleet.events(p, "released") for p in range(3)] == [[{"nonce": "early"}]] * 3
    assert_same_result(fleet, whole)


def test_a_killed_worker_ends_in_a_named_failure_and_the_run_can_be_resumed(
    zygote: Zygote, tmp_path: Path, links_to_kill: list[dict[str, Any]]
) -> None:
    job = replace(JOB, steps=4, checkpoint_every=1)
    undisturbed = Fleet(tmp_path / "one", zygote, job, direct_links())
    undisturbed.launch()
    assert undisturbed.wait() == [0, 0, 0]
    fleet = Fleet(tmp_path / "two", zygote, job, [{**link, **SOON_LOST} for link in links_to_kill])
    held_of_all(fleet, 1)
    os.kill(fleet.pids[2], signal.SIGKILL)
    assert fleet.wait() == [4, 4, -9]
    for p in (0, 1):
        found = fleet.exit(p)
        assert found["status"] == "failed"
        assert found["party"] == 2
        assert "party 2" in found["error"]
        assert [e["party"] for e in fleet.events(p, "peer_lost")] == [2]
    fleet.links = links_to_kill
    fleet.launch(resume=True)
    assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    assert {fleet.events(p, "resumed")[0]["step"] for p in range(3)} == {1}
    assert_same_result(fleet, undisturbed)


def test_resuming_a_finished_run_repeats_its_end_and_nothing_else(zygote: Zygote, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, zygote, replace(JOB, steps=3, checkpoint_every=2), direct_links())
    for _ in range(2):
        fleet.launch(resume=True)
        assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    seen = [fleet.events(p, "open_final_done") for p in range(3)]
    assert len({str(e) for found in seen for e in found}) == 1
    assert [len(found) for found in seen] == [2, 2, 2]
    assert [e["step"] for e in fleet.events(1, "resumed")] == [2]
    assert len(fleet.csv(0)) == 4


def test_a_halt_at_the_last_step_leaves_only_the_result_to_do(zygote: Zygote, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, zygote, replace(JOB, steps=1), direct_links())
    held_of_all(fleet, 1)
    halt(fleet, 2, HALT)  # a held run can be halted
    assert fleet.wait() == [0, 0, 0]
    assert fleet.exit(1)["step"] == 1
    fleet.launch(resume=True)
    assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    assert fleet.result(0)["values"]["loss"] == pytest.approx(float(fleet.csv(0)[1].split(",")[1]))


def test_another_attempt_starts_over_under_other_masks(zygote: Zygote, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, zygote, replace(JOB, steps=2), direct_links())
    roots = []
    for attempt in (0, 1):
        fleet.launch(resume=True, attempt=attempt)
        assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
        roots.append(fleet.roots(0))
    assert not set(roots[0].values()) & set(roots[1].values())
    assert (fleet.dir(0) / "earlier0_transcript_p0r0s0t0" / "leaves.bin").exists()
    fleet.launch(attempt=0)
    assert fleet.wait() == [2, 2, 2]
    assert "attempt 0 after attempt 1" in fleet.exit(0)["error"]


def test_sigterm_at_one_party_halts_all(zygote: Zygote, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, zygote, JOB, direct_links())
    held_of_all(fleet, 1)
    os.kill(fleet.pids[0], signal.SIGTERM)
    assert fleet.wait() == [0, 0, 0]
    assert {(fleet.exit(p)["status"], fleet.exit(p)["step"]) for p in range(3)} == {("halted", 1)}


def test_a_worker_that_waits_for_its_peers_can_be_halted(zygote: Zygote, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, zygote, JOB, direct_links())
    fleet.launch(only=(0,))
    until(lambda: (fleet.dir(0) / "run.json").exists(), 500, "the start")
    halt(fleet, 0, HALT)
    assert fleet.wait() == [0]
    assert fleet.exit(0)["status"] == "halted"


def refuse_signature(fleet: Fleet) -> None:
    file = fleet.home(0) / "signatures.json"
    lines = file.read_text().replace('"2": ', '"x": ').replace('"1": ', '"2": ').replace('"x": ', '"1": ')
    file.write_text(lines)


def refuse_policy(fleet: Fleet) -> None:
    file = fleet.home(0) / "policy.json"
    file.write_bytes(file.read_bytes().replace(b'"steps":12', b'"steps":13'))


def refuse_inputs(fleet: Fleet) -> None:
    file = fleet.home(0) / "inputs"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def refuse_foreign_inputs(fleet: Fleet) -> None:
    (fleet.home(0) / "inputs").write_bytes((fleet.home(1) / "inputs").read_bytes())


def refuse_identity(fleet: Fleet) -> None:
    (fleet.home(0) / "identity" / "ed25519").chmod(0o644)


def refuse_model(fleet: Fleet) -> None:
    """All three signed it: who reads the policy would take the run for one of another model."""
    policy = Policy.from_json(fleet.policy.to_json() | {"model_hash": "0" * 64})
    (fleet.home(0) / "policy.json").write_bytes(policy.canonical)
    signed = {p: sign_policy(identity, policy, CODE) for p, identity in enumerate(PARTIES)}
    write_signatures(fleet.home(0) / "signatures.json", signed)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (refuse_model, "model_hash is of another model than its job"),
        (refuse_signature, "P1's signature does not hold"),
        (refuse_policy, "signature does not hold"),
        (refuse_inputs, "altered"),
        (refuse_foreign_inputs, "for another recipient"),
        (refuse_identity, "readable by others"),
    ],
)
def test_a_worker_refuses_to_start_and_says_why(zygote: Zygote, tmp_path: Path, spoil: Any, words: str) -> None:
    fleet = Fleet(tmp_path, zygote, JOB, direct_links())
    spoil(fleet)
    fleet.launch(only=(0,))
    assert fleet.wait()[0] in (1, 2)
    assert words in fleet.exit(0)["error"]
    assert fleet.events(0, "run_failed")
    assert not fleet.events(0, "link_up")


def test_other_code_or_a_session_known_under_another_policy_is_refused(zygote: Zygote, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, zygote, JOB, direct_links())
    registry = fleet.home(0) / "identity" / "sessions.jsonl"
    registry.write_text(json.dumps({"sid_job": fleet.policy.sid_job.hex(), "policy_hash": "0" * 64}) + "\n")
    fleet.launch(only=(0,))
    assert fleet.wait() == [3]
    assert "under another policy" in fleet.exit(0)["error"]
    fleet.launch(only=(0,), lie="runs_other_code")
    assert fleet.wait() == [2]
    assert "this worker is ffff" in fleet.exit(0)["error"]


def test_parties_with_different_policies_do_not_start(zygote: Zygote, tmp_path: Path) -> None:
    links = direct_links()
    one = Fleet(tmp_path / "one", zygote, JOB, links)
    two = Fleet(tmp_path / "two", zygote, replace(JOB, lr=0.25), links)
    pids = [*one.launch(only=(0, 1), attempt=0), *two.launch(only=(2,))]
    until(lambda: one.events(0, "link_up"), 500, "P0 and P1 to meet")
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    for fleet in (one, two):
        fleet.wait()
    assert not one.roots(0)
    assert not two.roots(2)
