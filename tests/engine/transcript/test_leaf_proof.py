"""One leaf of a transcript: proven to a stranger, opened by an end of the message, and nothing else passes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from blake3 import blake3

from uvcc_engine.bench.work.rehearsal import Rehearsal, exchange, rehearse
from uvcc_engine.cli import main
from uvcc_engine.contract.errors import ConfigError, UnreadableError, VerificationError
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.exchange.evidence import WorkerEvidence, blinding_keys
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.leaf import Leaf
from uvcc_engine.transcript.proof.bundle import find_folders
from uvcc_engine.transcript.proof.leaf_proof import check, open_leaf, prove
from uvcc_engine.transcript.proof.verifier import verify

HERE = Coord(0, 0, 0, 0)


SAID = b"a share of something"


def traffic(workers: Mapping[int, WorkerEvidence], epoch: int, *, seed: str, ops: int) -> None:
    """Random messages, and one whose content is known."""
    exchange(workers, epoch, seed=seed, ops=ops)
    tag = epoch, 0, 1 << 20, kinds.RESHARE
    workers[0].recorder.record(0, 1, tag, SAID)
    workers[1].recorder.record(1, 0, tag, SAID)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    return rehearse(tmp_path_factory.mktemp("run"), steps=2, ops=4, traffic=traffic)


@pytest.fixture(scope="module")
def folder(made: Rehearsal) -> Path:
    return find_folders(made.folder)[HERE]


def leaves(folder: Path, epoch: int) -> list[Leaf]:
    return [
        Leaf.unpack(record)
        for file, block in leaf_file.blocks(folder / leaf_file.LEAVES)
        if block.epoch == epoch
        for record in leaf_file.records(file, block)
    ]


def test_every_leaf_of_an_epoch_is_proven(made: Rehearsal, folder: Path) -> None:
    there = leaves(folder, 1)
    assert len(there) > 8
    for index, leaf in enumerate(there):
        said = check(canonical(prove(folder, 1, index)), made.policy)
        assert leaf.name in said
        assert "p0r0s0t0 signed, of epoch 1" in said


def test_an_altered_proof_does_not_hold(made: Rehearsal, folder: Path) -> None:
    found = prove(folder, 1, 3)
    other = prove(folder, 1, 4)
    for name in ("index", "record", "proof"):
        with pytest.raises(VerificationError, match="is not in the root"):
            check(canonical({**found, name: other[name]}), made.policy)
    with pytest.raises(VerificationError, match=r"in another job|not signed"):
        check(canonical(prove(folder, 1, 3)), rehearsed_elsewhere(made))
    lied = {**found["root"]["statement"], "leaves": found["root"]["statement"]["leaves"] + 1}
    with pytest.raises(VerificationError, match="not signed by the key"):
        check(canonical({**found, "root": {**found["root"], "statement": lied}}), made.policy)
    for name, value in (("record", "zz"), ("record", "00"), ("proof", "x"), ("index", -1), ("format", "v0")):
        with pytest.raises(UnreadableError):
            check(canonical({**found, name: value}), made.policy)


def rehearsed_elsewhere(made: Rehearsal):  # type: ignore[no-untyped-def]
    from uvcc_engine.transcript.terms.policy import Policy

    return Policy.from_json({**made.policy.to_json(), "nonce": "ff" * 32})


def test_both_ends_open_a_message_and_nobody_opens_another(made: Rehearsal, folder: Path) -> None:
    """The result's payload is known to the test: it is what the worker signed."""
    bundle = json.loads((made.folder / "proof_bundle.json").read_text())
    opened = bundle["workers"][0]["openings"][-1]
    found = prove(folder, opened["epoch"], opened["index"])
    assert found["record"] == opened["record"]
    shown = open_leaf(found, made.policy, made.identities[0], bytes.fromhex(opened["payload"]))
    assert shown["blind"] == opened["blind"]
    assert "the payload shown is the one recorded" in check(canonical(shown), made.policy)
    with pytest.raises(ConfigError, match="are not the payload"):
        open_leaf(found, made.policy, made.identities[0], b"another")
    with pytest.raises(ConfigError, match="open it at its own party"):
        open_leaf(found, made.policy, made.identities[1], b"")
    with pytest.raises(VerificationError, match="is not that of"):
        check(canonical({**shown, "payload": "00"}), made.policy)


@pytest.mark.parametrize("party", [0, 1])
def test_either_end_opens_a_message_between_parties(made: Rehearsal, party: int) -> None:
    folder = find_folders(made.folder)[Coord(0, party, 0, 0)]
    at = next(i for i, leaf in enumerate(leaves(folder, 1)) if leaf.op == 1 << 20 and leaf.src != leaf.dst)
    shown = open_leaf(prove(folder, 1, at), made.policy, made.identities[party], SAID)
    assert "the payload shown is the one recorded" in check(canonical(shown), made.policy)
    assert shown["record"][-64:] == blake3(SAID, key=bytes.fromhex(shown["blind"])).hexdigest()
    for name, value in (("payload", SAID[1:].hex()), ("blind", "00" * 32)):
        with pytest.raises(VerificationError, match="is not that of"):
            check(canonical({**shown, name: value}), made.policy)
    for blind in ("00", "00" * 33):
        with pytest.raises(UnreadableError, match="32 bytes"):
            check(canonical({**shown, "blind": blind}), made.policy)


def test_the_blinds_of_a_pair_are_equal_at_both_ends(made: Rehearsal) -> None:
    mine = blinding_keys(made.identities[0], made.policy, HERE)
    theirs = blinding_keys(made.identities[1], made.policy, Coord(0, 1, 0, 0))
    assert mine[1] == theirs[0]
    assert mine[0] != theirs[1]


def test_the_commands(made: Rehearsal, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", str(folder), "0"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(leaves(folder, 0))
    assert any("POLICY of P0" in line for line in listed)
    at = next(line.split()[0] for line in listed if "POLICY of P0" in line)
    assert main(["prove", str(folder), f"0:{at}"]) == 0
    (tmp_path / "proof.json").write_text(capsys.readouterr().out)
    (tmp_path / "policy.json").write_bytes(made.policy.canonical)
    assert main(["prove", str(tmp_path / "proof.json"), "--policy", str(tmp_path / "policy.json")]) == 0
    assert "POLICY of P0" in capsys.readouterr().out
    (tmp_path / "payload").write_bytes(made.policy.hash)
    words = ["--policy", str(tmp_path / "policy.json"), "--payload", str(tmp_path / "payload")]
    assert main(["open", str(folder), f"0:{at}", "--identity", str(made.folder / "identity" / "0"), *words]) == 0
    (tmp_path / "opened.json").write_text(capsys.readouterr().out)
    assert main(["prove", str(tmp_path / "opened.json"), "--policy", str(tmp_path / "policy.json")]) == 0
    assert "the one recorded" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["0:99999"], ["77:0"], ["0:x"], ["0:-1"]])
def test_what_is_not_there_is_said(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", str(folder), *words]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "words", [["0:2", "--policy"], ["0", "--policy"], ["--head", "2", "--policy"], ["0", "--head", "1"]]
)
def test_what_would_not_be_looked_at_is_refused(
    words: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A proof that is made is checked under no policy: whoever names one is not to believe so."""
    named = [*words, str(tmp_path / "no-policy.json")] if words[-1] == "--policy" else words
    assert main(["prove", str(folder), *named]) == 2
    assert ("leave it out where one is made" in capsys.readouterr().err) is (words[-1] == "--policy")


def test_a_later_head_extends_an_earlier_one(
    made: Rehearsal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "policy.json").write_bytes(made.policy.canonical)
    for size in (1, 2, 3):
        assert main(["prove", str(made.folder), "--head", str(size)]) == 0
        text = capsys.readouterr().out
        (tmp_path / "heads.json").write_text(text)
        assert main(["prove", str(tmp_path / "heads.json"), "--policy", str(tmp_path / "policy.json")]) == 0
        said = capsys.readouterr().out
        assert f"extends that over {size}" in said
        found = json.loads(text)
        assert verify(made.folder, head=(size, found["first_head"])).run_root == found["second_head"]
        wrong = canonical({**found, "first_head": "00" * 32})
        with pytest.raises(VerificationError, match="does not extend"):
            check(wrong, made.policy)
    assert main(["prove", str(made.folder), "--head", "9"]) == 2
