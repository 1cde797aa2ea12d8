"""What a ledger keeps, counts and refuses, without a run: each rule by itself."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.foundation import claim_ledger
from uvcc_engine.mpc.foundation.bilinear_claims import NUMBERS, BilinearClaim
from uvcc_engine.mpc.foundation.claim_ledger import ClaimLedger, ProductNotes, ProvedStep, TruncationNotes, needs_claim
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.transcript.formats import kinds


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int64)


def _product(form: str, x: tuple[int, ...], y: tuple[int, ...] | None, z: tuple[int, ...]) -> ProductNotes:
    right = None if y is None else Share(_ones(*y), _ones(*y))
    return ProductNotes(form, Share(_ones(*x), _ones(*x)), right, 1, None, _ones(*z), _ones(*z), _ones(*z))


def _squares(n: int = 3) -> ProductNotes:
    return _product(claim_ledger.ELEMENTWISE, (n,), (n,), (n,))


def _equation(n: int = 3, terms: int = 1) -> BilinearClaim:
    return BilinearClaim(0, NUMBERS, terms, (n,), [_ones(n)] * terms, None, _ones(n), None)


@pytest.mark.parametrize("kind", [kinds.OPEN, kinds.RESHARE, kinds.DEALER, kinds.PROOF, kinds.COIN, kinds.AUDIT])
@pytest.mark.parametrize("numbers", [0, 1])
def test_what_has_to_be_covered_is_all_but_a_proof_and_the_zeros_of_an_opening_withheld(
    kind: int, numbers: int
) -> None:
    of_the_proof = kind in (kinds.PROOF, kinds.COIN, kinds.AUDIT)
    assert needs_claim(kind, _ones(2) * numbers) == (not of_the_proof and (kind != kinds.OPEN or numbers == 1))


def test_what_is_kept_for_a_claim_is_told_in_words_that_are_the_same_at_all_parties() -> None:
    """The bound of an instalment is over them: two parties that counted otherwise would wait for each other."""
    one = _product(claim_ledger.MATMUL, (2, 3), (3, 5), (2, 5))
    assert (one.count, one.words) == (10, 4 * 10 + 2 * (6 + 15))
    one.truncation = TruncationNotes(16)
    assert one.words == 11 * 10 + 2 * (6 + 15)
    assert _product(claim_ledger.LINEAR, (4,), None, (4,)).words == 4 * 4 + 2 * 4
    assert _equation(6, 2).words == 6 * (4 * 2 + 2) // 3


@pytest.mark.parametrize(
    ("form", "x", "y", "z"),
    [
        (claim_ledger.MATMUL, (2, 3), (3, 5), (2, 5)),
        (claim_ledger.MATMUL, (7, 2, 3), (7, 3, 5), (7, 2, 5)),
        (claim_ledger.SUMMED, (2, 3), (2, 3), (2,)),
        (claim_ledger.PATCHES, (4, 3), (3, 5), (2, 9)),
        (claim_ledger.ELEMENTWISE, (2, 3), (3,), (2, 3)),
        (claim_ledger.LINEAR, (2, 3), None, (2, 3)),
        (claim_ledger.MATMUL, (0, 0), (0, 5), (0, 5)),
    ],
)
def test_a_product_of_a_form_that_has_a_proof_is_kept(form: str, x: Any, y: Any, z: Any) -> None:
    ledger = ClaimLedger()
    notes = _product(form, x, y, z)
    assert ledger.file(notes) is notes
    assert ledger.last is notes
    assert (len(ledger), ledger.filed, ledger.settled_words) == (1, notes.count, 0)
    ledger.settle(notes)
    assert (notes.settled, ledger.settled_words) == (True, notes.words)


@pytest.mark.parametrize(
    ("form", "x", "y", "z"),
    [
        (claim_ledger.MATMUL, (3,), (3,), ()),
        (claim_ledger.MATMUL, (7, 2, 3), (3, 5), (7, 2, 5)),
        (claim_ledger.MATMUL, (2, 3), (7, 3, 5), (7, 2, 5)),
        (claim_ledger.MATMUL, (7, 2, 3), (7, 3, 5), (2, 5)),
        (claim_ledger.MATMUL, (2, 3), None, (2, 5)),
        (claim_ledger.SUMMED, (2, 3), (3,), (2,)),
        (claim_ledger.SUMMED, (2, 3), (2, 3), (3,)),
        (claim_ledger.SUMMED, (2, 3), None, (2,)),
        (claim_ledger.PATCHES, (4, 3), (3, 5), (2, 3, 3)),
        ("", (2,), (2,), (2,)),
        (claim_ledger.MATMUL, (2, 0), (0, 5), (2, 5)),
        (claim_ledger.SUMMED, (2, 0), (2, 0), (2,)),
        (claim_ledger.PATCHES, (4, 0), (0, 5), (2, 9)),
    ],
)
def test_a_product_without_a_proof_is_refused_and_not_kept(form: str, x: Any, y: Any, z: Any) -> None:
    ledger = ClaimLedger()
    with pytest.raises(ConfigError, match="has no proof"):
        ledger.file(_product(form, x, y, z))
    assert (len(ledger), ledger.filed) == (0, 0)


def test_only_what_is_settled_is_taken_for_an_instalment_and_nothing_twice() -> None:
    ledger = ClaimLedger(everything=True, sisters=True, committed=False)
    first, second, nothing = (ledger.file(_squares(n)) for n in (3, 5, 0))
    ledger.claim(_equation(4), _equation(0))
    ledger.settle(first)
    ledger.settle(nothing)
    assert ledger.settled_words == first.words + nothing.words + _equation(4).words
    assert ledger.filed == 3 + 5 + 4
    taken = ledger.take_settled()
    assert (taken.everything, taken.sisters, taken.audit_one_in) == (True, True, 0)
    assert not taken.copies_agree
    assert (len(taken), len(ledger), ledger.settled_words, ledger.filed) == (2, 1, 0, 12)
    products, claims = taken.take()
    assert products == [first]
    assert [one.count for one in claims] == [4]
    ledger.settle(second)
    ledger.take_in(other := ClaimLedger())
    other.file(third := _squares())
    other.claim(equation := _equation(2))
    other.instalments.append(proved := ProvedStep(1, (1, 0, 0), b"", b""))
    ledger.take_in(other)
    assert ledger.take_instalments() == [proved]
    assert ledger.take_instalments() == other.take_instalments() == []
    assert ledger.take() == ([second, third], [equation])
    assert (len(other), len(ledger)) == (0, 0)


@pytest.mark.parametrize("flags", itertools.product([False, True], repeat=3), ids=str)
@pytest.mark.parametrize("audit", [0, 4])
def test_copies_agree_only_where_everything_is_proved_of_one_worker_from_what_was_committed(
    flags: tuple[bool, bool, bool], audit: int
) -> None:
    everything, sisters, committed = flags
    ledger = ClaimLedger(everything=everything, sisters=sisters, committed=committed, audit_one_in=audit)
    assert ledger.copies_agree == (everything and committed and not sisters and audit == 0)


def test_the_verdicts_of_the_step_before_are_heard_once() -> None:
    ledger, heard = ClaimLedger(), []
    ledger.hear()
    ledger.unheard = lambda: heard.append(ledger.unheard)
    ledger.hear()
    ledger.hear()
    assert heard == [None]


def _waiting() -> Iterator[tuple[str, ClaimLedger, bool]]:
    yield "empty", ClaimLedger(), False
    for how in ("product", "claim"):
        for sisters in (False, True):
            ledger = ClaimLedger(sisters=sisters)
            ledger.all_proved()
            ledger.file(_squares()) if how == "product" else ledger.claim(_equation())
            yield f"{how} {sisters}", ledger, True
            taken = ClaimLedger(sisters=sisters)
            taken.all_proved()
            taken.file(_squares()) if how == "product" else taken.claim(_equation())
            taken.take()
            yield f"{how} {sisters} taken", taken, sisters
    yield "sisters", ClaimLedger(sisters=True), True
    held = ClaimLedger()
    held.hold_openings()
    yield "held", held, True
    into = ClaimLedger(sisters=True)
    into.all_proved()
    into.take_in(ClaimLedger())
    yield "taken in", into, True
    alone = ClaimLedger()
    alone.take_in(ClaimLedger())
    yield "taken in alone", alone, False


@pytest.mark.parametrize(("ledger", "waits"), [pytest.param(x, w, id=name) for name, x, w in _waiting()])
def test_nothing_is_opened_before_what_it_may_depend_on_is_proved(ledger: ClaimLedger, waits: bool) -> None:
    ledger.check_message(kinds.RESHARE, proved=False, opening=False)
    if not waits:
        return ledger.check_message(kinds.OPEN, proved=False, opening=True)
    with pytest.raises(ConfigError, match="something would be opened before"):
        ledger.check_message(kinds.OPEN, proved=False, opening=True)
    ledger.take()
    ledger.all_proved()
    return ledger.check_message(kinds.OPEN, proved=False, opening=True)


def test_where_everything_is_proved_no_message_goes_without_a_claim() -> None:
    ledger = ClaimLedger(everything=True)
    for kind in (kinds.PROOF, kinds.COIN, kinds.AUDIT, kinds.FINDING):
        ledger.check_message(kind, proved=False, opening=False)
    ledger.check_message(kinds.RESHARE, proved=True, opening=False)
    ledger.check_message(kinds.OPEN, proved=False, opening=True)
    with pytest.raises(ConfigError, match="has no proof"):
        ledger.check_message(kinds.RESHARE, proved=False, opening=False)
    for promised, filed in ((0, 0), (4, 2), (2, 2)):
        ledger.check_promises(promised, filed)
    for promised, filed in ((1, 0), (5, 2)):
        with pytest.raises(ConfigError, match="were sent as proved"):
            ledger.check_promises(promised, filed)
        ClaimLedger().check_promises(promised, filed)


def test_all_that_was_filed_on_a_device_is_brought_to_the_host_each_tensor_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here ``cpu`` copies, as from a device it does."""
    copied: list[Tensor] = []

    def cpu(x: Tensor) -> Tensor:
        copied.append(x)
        return x.clone()

    ledger = ClaimLedger()
    both, alone = ledger.file(_squares()), ledger.file(_product(claim_ledger.LINEAR, (3,), None, (3,)))
    both.received = {1: _ones(3) * 7}
    both.own = both.following  # of one tensor there is one copy
    truncated = both.truncation = TruncationNotes(16, p=_ones(3) * 2, opened=_ones(3) * 3)
    equation = _equation(3, 2)
    ledger.claim(equation)
    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    ledger.bring_to_host()
    (first, second), (brought,) = ledger.take()
    assert len(copied) == len({id(x) for x in copied})

    def tensors(one: Any) -> list[Tensor]:
        if isinstance(one, Tensor):
            return [one]
        if dataclasses.is_dataclass(one):
            return [t for f in dataclasses.fields(one) for t in tensors(getattr(one, f.name))]
        if isinstance(one, dict | list):
            return [t for inner in (one.values() if isinstance(one, dict) else one) for t in tensors(inner)]
        return []

    for before, after in ((both, first), (alone, second), (equation, brought)):
        old, new = tensors(before), tensors(after)
        assert len(old) == len(new) > 0
        assert all(a is not b and torch.equal(a, b) for a, b in zip(old, new, strict=True))
    assert first.own is first.following
    assert first.truncation is not truncated
    assert (first.truncation or truncated).s == 16
    assert (second.y, second.truncation, brought.after, brought.own_after) == (None, None, None, None)
