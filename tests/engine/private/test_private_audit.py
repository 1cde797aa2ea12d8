"""The owner's replay of runs by whole processes: an honest one holds, and whoever altered one share is named, alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from private_kit import OWNER, PARTIES, Fleet, Zygote, direct_links, shared_digits

from uvcc_engine.contract.errors import ConfigError, UnreadableError, VerificationError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.mpc.foundation.prg import PairKeys
from uvcc_engine.owner import audit as owners_audit
from uvcc_engine.owner import program_form
from uvcc_engine.owner.client import write_shared
from uvcc_engine.sealing.joint import combine
from uvcc_engine.sealing.seeds import open_seeds, seal_seeds
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.leaf import SENT, WIRE_KINDS, Leaf
from uvcc_engine.transcript.leaves.leaf_file import folder_name
from uvcc_engine.transcript.terms.policy import Policy

JOB = PrivateJob(steps=3, batch=16, checkpoint_every=3, test_rows=20, reveal=("loss", "accuracy", "seeds"))
LIAR = 1


def ended(zygote: Zygote, folder: Path, lie: str = "") -> Fleet:
    """A run to its end, one party lying if asked to; its sealed inputs lie beside it."""
    fleet = Fleet(folder, zygote, JOB, direct_links())
    for party in range(3):
        fleet.dir(party).mkdir()
        request = {"spec": fleet.spec(party).to_json(), "log": str(fleet.home(party) / "worker.log")}
        if party == LIAR and lie:
            request["lie"] = lie
        fleet.pids.append(zygote.ask(request)["pid"])
    fleet.wait()
    write_shared(shared_digits(JOB), folder.parent / "sealed")
    return fleet


def audited(fleet: Fleet) -> owners_audit.Audit:
    folder = fleet.folder
    return owners_audit.audit(folder, OWNER, folder.parent / "sealed", fleet.home(0) / "policy.json")


def assert_form_is_the_programs(fleet: Fleet) -> None:
    """The program on zeros sends what the parties sent: message for message the same kind, size and place."""
    policy = Policy.load(fleet.home(0) / "policy.json")
    epochs = list(program_form.expected(policy))
    for epoch, wanted in enumerate(epochs):
        for party, due in enumerate(wanted):
            records, whole = owners_audit.recorded(fleet.dir(party) / folder_name(Coord(0, party, 0, 0)), epoch)
            assert whole
            found = [record[: program_form.HEAD] for record in records.values()]
            assert sorted(found) == sorted(due)
            program_form.check_same("it", due, found)
            without = [head for head in found if head != due[3]]
            with pytest.raises(VerificationError, match="which the program sends"):
                program_form.check_same("it", due, without)
            longer = Leaf.unpack(due[3] + bytes(32))._replace(size=7).pack()[: program_form.HEAD]
            with pytest.raises(VerificationError, match="of 7 bytes, which the program does not send"):
                program_form.check_same("it", due, [*found, longer])
    assert len(epochs) == JOB.steps + 1


@pytest.mark.ci("tests/engine/private/test_served_base.py")
def test_an_honest_run_is_as_the_program_computes_it(
    zygote: Zygote, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = ended(zygote, tmp_path / "run")
    OWNER.store(tmp_path / "owner")
    policy = str(fleet.home(0) / "policy.json")
    argv = [str(fleet.folder), "--owner", str(tmp_path / "owner"), "--sealed", str(tmp_path / "sealed")]
    assert owners_audit.main([*argv, "--policy", policy, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["epochs"] == JOB.steps + 1
    assert found["messages"] > 3 * 100
    assert_form_is_the_programs(fleet)
    assert owners_audit.main(argv) == 2  # no policy.json right there
    (fleet.dir(2) / "seeds_p2r0s0t0.box").unlink()
    with pytest.raises(UnreadableError, match="0 files seeds_p2r0s0t0"):
        audited(fleet)


def test_a_share_altered_inside_a_product_goes_unnoticed_by_the_parties_and_is_pinned_on_its_sender(
    zygote: Zygote, tmp_path: Path
) -> None:
    found = audited(ended(zygote, tmp_path / "run", "alters_a_product"))
    assert (found.parties, found.epoch) == ((LIAR,), 2)
    assert found.what.startswith(f"RESHARE P{LIAR}->")
    assert f"P{LIAR} at epoch 2" in found.text()


def test_an_altered_opening_is_pinned_on_the_one_holder_who_lied(zygote: Zygote, tmp_path: Path) -> None:
    fleet = ended(zygote, tmp_path / "run", "alters_an_opened_share")
    assert "disagree on a share" in str(fleet.exit(0)["error"]) + str(fleet.exit(2)["error"])
    found = audited(fleet)
    assert (found.parties, found.epoch) == ((LIAR,), 2)
    assert found.what.startswith(f"OPEN P{LIAR}->")


@pytest.mark.ci("tests/engine/transcript/test_own_history.py")
def test_whoever_hands_the_files_over_cannot_pin_on_a_party_what_it_did_not_sign(
    zygote: Zygote, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, honest = ended(zygote, tmp_path / "run"), 2
    folder = fleet.dir(honest) / folder_name(Coord(0, honest, 0, 0))
    path, whole = folder / leaf_file.LEAVES, (folder / leaf_file.LEAVES).read_bytes()
    for file, block in leaf_file.blocks(path):
        records, sent = list(leaf_file.records(file, block)), SENT.to_bytes(1, "little")
        if block.epoch == 1:
            mine = next(r for r in records if r[:1] == sent and Leaf.unpack(r).kind in WIRE_KINDS)
    assert whole.count(mine) == 1
    path.write_bytes(whole.replace(mine, mine[:-1] + bytes([mine[-1] ^ 1])))
    with pytest.raises(VerificationError, match=f"p{honest}r0s0t0/leaves.bin, epoch 1"):
        audited(fleet)
    path.write_bytes(whole)
    assert not audited(fleet).note
    for party in range(3):  # all that is left of the run is its beginning, in every folder
        there = fleet.dir(party) / folder_name(Coord(0, party, 0, 0))
        for name in (leaf_file.ROOTS, leaf_file.PEERS):
            (there / name).unlink()
        (there / leaf_file.LEAVES).write_bytes((there / leaf_file.LEAVES).read_bytes()[: _first_block(there)])
    found = audited(fleet)
    assert (found.epochs, found.parties) == (1, ())
    assert "the rest was not handed over" in found.text()


def _first_block(folder: Path) -> int:
    """Where the first epoch of a transcript ends."""
    return next(block.end for _, block in leaf_file.blocks(folder / leaf_file.LEAVES))


@pytest.mark.ci(__file__)
def test_a_message_recorded_otherwise_than_sent_leaves_its_two_ends(zygote: Zygote, tmp_path: Path) -> None:
    found = audited(ended(zygote, tmp_path / "run", "sends_other_than_it_records"))
    assert found.epoch == 2
    assert LIAR in found.parties
    assert len(found.parties) == 2


# ---- without processes ---------------------------------------------------------------------------------------------


def test_missing_and_extra_messages_are_found_unless_the_epoch_was_cut_short() -> None:
    leaves = [Leaf(d, 2, s, t, op, 0, 0, 8, bytes(32)) for op in range(3) for d, s, t in ((0, 0, 1), (1, 1, 0))]
    program = [leaf.pack() for leaf in leaves]
    held = {leaf.key: leaf.pack() for leaf in leaves}
    assert owners_audit.first_deviation(program, held, whole=True) is None
    gone = held.pop(leaves[2].key)
    assert owners_audit.first_deviation(program, held, whole=True) == leaves[2]
    assert owners_audit.first_deviation(program, held, whole=False) is None
    held[leaves[2].key] = gone
    extra = Leaf(0, 2, 0, 2, 9, 0, 0, 8, bytes(32))
    assert owners_audit.first_deviation(program, held | {extra.key: extra.pack()}, whole=True) == extra


def _all_leaves(sent: list[Leaf]) -> list[list[bytes]]:
    """By party, in order: what it records of these messages, each sent and received."""
    both = [(leaf.src, leaf) for leaf in sent] + [(leaf.dst, leaf._replace(direction=1)) for leaf in sent]
    both.sort(key=lambda one: (one[1].op, one[1].direction))
    return [[leaf.pack() for party, leaf in both if party == p] for p in range(3)]


def test_who_was_misled_is_not_named_for_what_it_said_afterwards() -> None:
    """P1 records another message than it sends P2, and what P2 then sends P0 is not what the program sends either."""
    honest = [Leaf(0, 2, 1, 2, 0, 0, 0, 8, bytes(32)), Leaf(0, 2, 2, 0, 1, 0, 0, 8, bytes(32))]
    program = _all_leaves(honest)
    misled = _all_leaves([leaf._replace(digest=bytes(31) + b"x") for leaf in honest])
    held = [misled[0], program[1], misled[2]]
    found = [({Leaf.unpack(r).key: r for r in records}, True) for records in held]
    verdict = owners_audit.judge(2, program, found)
    assert verdict is not None
    assert verdict.parties == (1, 2)
    coords = [Coord(0, p, 0, 0) for p in range(3)]
    timed = {c: [(Leaf.unpack(r).op, r) for r in program[c.party]] for c in coords}
    verdict = owners_audit.judge_fleet(2, timed, dict(zip(coords, found, strict=True)))
    assert verdict is not None
    assert verdict.parties == (1, 2)


def test_seeds_are_for_one_owner_one_job_and_agree_at_both_ends(zygote: Zygote, tmp_path: Path) -> None:
    policy = Fleet(tmp_path / "run", zygote, JOB, direct_links()).policy
    sealed = shared_digits(JOB)
    keys = PairKeys(prev=b"p" * 32, next=b"n" * 32, own=b"o" * 32)
    coord = Coord(0, 0, 0, 0)

    def made(party: int) -> bytes:
        where = replace(coord, party=party)
        return seal_seeds(PARTIES[party], policy, where, prg=keys, attempt=0, sealed_inputs=sealed.boxes[party])

    opened = {
        p: open_seeds(made(p), owner=OWNER, sender=PARTIES[p].public, policy=policy, coord=replace(coord, party=p))
        for p in range(3)
    }
    assert opened[0].inputs(sealed.boxes[0], policy).rows("test_x") == JOB.test_rows
    with pytest.raises(VerificationError, match="altered"):
        opened[0].inputs(sealed.boxes[1], policy)
    with pytest.raises(VerificationError, match="P0 and P1 disclose different secrets"):
        owners_audit.check_pairs(opened)
    with pytest.raises(VerificationError, match="the box of p0r1s0t0 says"):
        away = replace(coord, replica=1)
        open_seeds(made(0), owner=OWNER, sender=PARTIES[0].public, policy=policy, coord=away)
    several = combine([sealed, replace(sealed, owner="ab" * 32)])
    with pytest.raises(ConfigError, match="several owners"):
        seal_seeds(PARTIES[0], policy, coord, prg=keys, attempt=0, sealed_inputs=several.boxes[0])
