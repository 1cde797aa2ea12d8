"""A root message that is foreseen is taken without a reader of JSON, and nothing is taken that the reader refuses."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from evidence_kit import World

from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.exchange import agreement
from uvcc_engine.transcript.exchange.agreement_message import AgreementMessage
from uvcc_engine.transcript.exchange.expected_root import as_expected
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.roots import EpochRoot
from uvcc_engine.transcript.signed.statements import RootStatement, Signed, Verdict, root_text, sign_root
from uvcc_engine.transcript.signing.sshsig import ROOT_NAMESPACE


@pytest.fixture
def said(tmp_path: Path) -> tuple[World, bytes]:
    """What P1 tells P0 about the last of three epochs."""
    world = World(tmp_path)
    workers = world.open()
    world.steps(range(3))
    return world, workers[1].agreement(0)


def read(body: bytes) -> AgreementMessage:
    found = AgreementMessage.parse("root", body)
    assert isinstance(found, AgreementMessage)
    return found


def foreseen(body: bytes) -> tuple[RootStatement, Signed | None]:
    """All that P0 knows before the message comes."""
    message = read(body)
    whole = message.signed.root
    unknown = EpochRoot(whole.root.epoch, b"", 0, 0, dict.fromkeys(whole.root.pairs, b""))
    return replace(whole, root=unknown), message.third


def test_what_is_foreseen_is_read_as_by_the_reader_of_json(said: tuple[World, bytes]) -> None:
    _, body = said
    found, signed = as_expected(body, *foreseen(body)), read(body).signed
    assert found is not None
    assert (found, found.root, found.text, found.line) == (signed, signed.root, signed.text, signed.line)


def test_an_honest_run_needs_no_reader_and_leaves_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = []
    for name, quick in (("quick", True), ("read", False)):
        with monkeypatch.context() as patch:
            if quick:
                patch.setattr(agreement.AgreementMessage, "parse", None)
            else:
                patch.setattr(agreement, "as_expected", lambda *of: None)
            world = World(tmp_path / name)
            world.open()
            world.steps(range(4))
            left.append([(world.transcript(p) / leaf_file.PEERS).read_bytes() for p in range(3)])
            world.close()
    assert left[0] == left[1]
    assert all(len(lines.splitlines()) == 8 for lines in left[0])


def test_whatever_a_message_is_changed_into_it_is_not_taken_without_its_reader(said: tuple[World, bytes]) -> None:
    """Each change of a byte, a byte too many, a byte too few: not what is foreseen, or not what the peer signed."""
    world, body = said
    due, rng = foreseen(body), random.Random(5)
    taken = 0
    for at in range(len(body)):
        for changed in (
            body[:at] + bytes([body[at] ^ 1 << rng.randrange(8)]) + body[at + 1 :],
            body[:at] + rng.choice((b" ", b"\\", b"0", b"\n", b'"')) + body[at:],
            body[:at] + body[at + 1 :],
        ):
            found = as_expected(changed, *due)
            if found is not None:
                taken += 1
                same = changed == body  # a letter before the same one
                assert found.holds(world.identities[1].public, ROOT_NAMESPACE) == same
    assert taken > 100  # of the root, the digests and the signature every value is possible


def test_other_words_than_those_foreseen_are_left_to_the_reader(said: tuple[World, bytes]) -> None:
    _, body = said
    due, third = foreseen(body)
    assert third is not None
    for other in (
        replace(due, head=bytes(32)),
        replace(due, sid_job=bytes(32)),
        replace(due, seen={0: bytes(32), 2: due.seen[2]}),
        replace(due, values={**due.values, "more": 0.5}),
        replace(due, root=replace(due.root, epoch=1)),
        replace(due, root=replace(due.root, pairs={0: b"", 1: b""})),
        replace(due, proved=Verdict(1, bytes(32), bytes(32))),
    ):
        assert as_expected(body, other, third) is None
    assert as_expected(body, due, None) is None
    assert as_expected(body, due, replace(third, signature="another")) is None


@pytest.mark.parametrize(("field", "most"), [(b'"leaves":', 2**48), (b'"opened":', 2**32)])
def test_counts_are_bounded_as_by_the_reader(said: tuple[World, bytes], field: bytes, most: int) -> None:
    _, body = said
    due, (before, _, after) = foreseen(body), body.partition(field)
    rest = after[after.index(b",") :]
    assert as_expected(before + field + b"%d" % (most - 1) + rest, *due) is not None
    for odd in (b"%d" % most, b"01", b"-1", b"1.0", b"1" * 5000):
        assert as_expected(before + field + odd + rest, *due) is None


def test_a_root_statement_is_spelled_as_the_general_encoder_spells_it(said: tuple[World, bytes]) -> None:
    world, body = said
    whole = read(body).signed.root
    for other in (
        whole,
        replace(whole, seen={}, values={}),
        replace(whole, values={"loss": 1.0, "accuracy": 1e-9, "z": -0.0, "steps": 3}),
        replace(whole, root=replace(whole.root, leaves=2**47, opened=0)),
        replace(whole, proved=Verdict(1, bytes(32), bytes(32))),
    ):
        assert root_text(other) == canonical(other.to_json())
        assert sign_root(world.identities[1], other).text == canonical(other.to_json())
