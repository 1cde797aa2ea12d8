"""What a proof tells a party, honest or lying, when everything that it knows stands still.

The party's shares and both of its random streams are the same in all runs; the third component of the secrets has one
of two values, and the stream that the party does not know is another one in each run. Then whatever it is sent for a
proof is either the same in all runs, so no secret is in it, or every bit of it is a fair coin. The lying party alters
one number in the step: it sees its proof fail, and learns no more.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from proof_kit import LyingRuntime
from torch import Tensor

from uvcc_engine.contract.errors import PeerLostError, ProofFailedError
from uvcc_engine.mpc.comparisons import selection
from uvcc_engine.mpc.foundation import local
from uvcc_engine.mpc.foundation.claim_ledger import ClaimLedger
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.prg import PairKeys
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share, share_of
from uvcc_engine.mpc.kernels.cpu import CpuKernels
from uvcc_engine.mpc.products import arithmetic
from uvcc_engine.mpc.products.summed import summed_products_protocol
from uvcc_engine.plane.api import Tag
from uvcc_engine.proofs import held_opening, settling, step_proof, verdicts
from uvcc_engine.proofs.galois_ring import GaloisRing
from uvcc_engine.proofs.step_proof import prove_and_open_protocol
from uvcc_engine.transcript.formats import kinds

RUNS = 6  # of each secret
SURE = 4.8  # standard deviations: some 10^5 bits are looked at
RING = GaloisRing(20)
SECRETS = (torch.zeros(2, 2, dtype=torch.int64), torch.full((2, 2), 5 << 20, dtype=torch.int64))
Seen = dict[tuple[int, int], list[bytes]]  # by sender and number: what was sent in each run


def _keys(party: int, run: int) -> list[PairKeys]:
    """The keys of the components that ``party`` knows, and its own, stay as they are."""

    def key(what: str, known: bool) -> bytes:
        return hashlib.sha256(f"{what} {'always' if known else run}".encode()).digest()

    shared = [key(f"component {c}", c in (party, (party + 1) % 3)) for c in range(3)]
    own = [key(f"own {p}", p == party) for p in range(3)]
    return [PairKeys(prev=shared[p], next=shared[(p + 1) % 3], own=own[p]) for p in range(3)]


def _components(party: int, secret: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(party)
    found = [torch.randint(-(2**63), 2**63 - 1, (2, 2), generator=gen) for _ in range(3)]
    found[(party + 2) % 3] = secret - found[party] - found[(party + 1) % 3]
    return found[0], found[1], found[2]


def _many(rt: Runtime, x: Share) -> MpcProtocol[list[Share]]:
    """Products of all kinds, a truncation, a comparison and its choice."""
    steps = arithmetic.matmul_protocol(rt, x, x), summed_products_protocol(rt, x, x, -1)
    return (yield from par(*steps, selection.relu_only_protocol(rt, x, dealer=0)))


def _bare(rt: Runtime, x: Share) -> MpcProtocol[Share]:
    """A product of what was shared: nothing in its proof is random but for the masks."""
    return (yield from arithmetic.matmul_protocol(rt, x.with_f(0), x.with_f(0)))


Program = Callable[[Runtime, Share], MpcProtocol[list[Share]] | MpcProtocol[Share]]


def _received(
    party: int, secret: Tensor, run: int, program: Program, *, lies: bool, patch: pytest.MonkeyPatch, step: bool
) -> Seen:
    """What ``party`` was sent for the proofs, and in the second round if one fails; of a ``step``, before them."""
    seen: Seen = defaultdict(list)

    patch.setattr(local, "rehearsal_keys", lambda seed: _keys(party, run))
    planes = LocalPlanes(0)
    counts = {src: 0 for src in range(3)}

    def numbered(src: int, dst: int, tag: Tag, body: bytes) -> bytes:
        if dst == party and (tag.kind in (kinds.PROOF, kinds.COIN, kinds.FINDING, kinds.OPEN)) != step:
            counts[src] += 1
            seen[src, counts[src]].append(body)
        return body

    planes.wire.tamper = numbered
    parts = _components(party, secret)

    def alter(sent: int, data: Tensor) -> None:
        if lies and sent == 0:
            data.view(-1)[0] += 1

    def body(rt: Runtime) -> bool:
        rt.ledger = ClaimLedger(everything=True)
        rt.__class__ = LyingRuntime
        rt.sends, rt.lie = 0, alter if rt.party == party else None  # type: ignore[attr-defined]
        found = rt.run(program(rt, share_of(parts, rt.party, 16)))
        if step:
            return True
        values = found if isinstance(found, list) else [found]
        try:  # whoever lies sees what it is sent of an opening; who does not may see what is opened
            rt.run(prove_and_open_protocol(rt, values if lies else (), RING))
        except (ProofFailedError, PeerLostError):
            return False
        return True

    assert planes.run_three(body) == [not lies] * 3
    return seen


def _told(party: int, program: Program, *, lies: bool, patch: pytest.MonkeyPatch, step: bool = False) -> list[str]:
    """What depends on the secret, or is no fair coin; empty if nothing."""
    seen: Seen = defaultdict(list)
    for number, secret in enumerate(SECRETS):
        for run in range(RUNS):
            numbered = RUNS * number + run
            got = _received(party, secret, numbered, program, lies=lies, patch=patch, step=step)
            for key, bodies in got.items():
                seen[key] += bodies
    found = []
    for (src, number), bodies in seen.items():
        where = f"message {number} of party {src}"
        if len(bodies) != 2 * RUNS or len({len(b) for b in bodies}) != 1:
            found.append(f"{where}: not the same size in every run")
            continue
        if len(set(bodies)) == 1:
            continue  # verdicts, suspicions, and digests of what others opened
        if len(bodies[0]) < 8:
            found.append(f"{where}: a verdict or suspicion that is not the same in every run")
            continue
        words = len(bodies[0]) // 8
        table = torch.frombuffer(bytearray(b"".join(b[: 8 * words] for b in bodies)), dtype=torch.int64)
        table = table.reshape(2 * RUNS, words)
        moving = (table != table[0]).any(0)  # a coin has as many bits as there are challenges
        bits = (table[:, moving, None] >> torch.arange(64)) & 1
        used = bits.any(0) & ~bits.all(0)
        if not bool((used.sum(-1) >= RING.degree).all()):
            found.append(f"{where}: of a word fewer bits move than a challenge has")
        rate = bits.to(torch.float64).mean((0, 1))[used.all(0)]
        bound = SURE * 0.5 / (2 * RUNS * max(1, int(moving.sum()))) ** 0.5
        found += [f"{where}: a bit is set in {100 * float(r):.0f} %" for r in rate if abs(float(r) - 0.5) > bound]
    return found


@pytest.mark.parametrize(
    ("program", "party", "lies"),
    [
        (_many, 0, True),
        pytest.param(_many, 1, True, marks=pytest.mark.ci(__file__)),
        pytest.param(_many, 2, True, marks=pytest.mark.ci(__file__)),
        (_bare, 2, True),
        (_bare, 2, False),
    ],
)
def test_a_proof_tells_nothing_to_who_checks_it_nor_to_who_lied(
    program: Program, party: int, lies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _told(party, program, lies=lies, patch=monkeypatch) == []


def _cut(rt: Runtime, x: Share) -> MpcProtocol[Share]:
    """A product and its truncation, which party 2 deals."""
    return (yield from arithmetic.matmul_protocol(rt, x, x))


@pytest.mark.parametrize("party", [0, 1, 2])
def test_a_truncation_that_will_be_proved_tells_nothing(party: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask is the dealer's own summand, so what online parties send each other is under the zero share alone."""
    assert _told(party, _cut, lies=False, patch=monkeypatch, step=True) == []


def test_a_truncation_without_a_zero_share_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    blind = CpuKernels.blind

    def bare(self: CpuKernels, z: Tensor, factor: int, plus: Tensor, minus: Tensor) -> Tensor:
        return blind(self, z, factor, torch.zeros_like(plus), torch.zeros_like(minus))

    monkeypatch.setattr(CpuKernels, "blind", bare)
    assert _told(0, _cut, lies=False, patch=monkeypatch, step=True)


def _unmasked(part: str) -> Callable[..., object]:
    honest = step_proof.draw_randomness

    def draw(*args: object) -> list[step_proof.ProverRandomness]:
        found = honest(*args)  # type: ignore[arg-type]
        for one in found:
            value = getattr(one, part)
            if value is not None:
                value.zero_()
        return found

    return draw


@pytest.mark.parametrize(
    ("part", "party", "lies"), [("summands", 1, False), ("slope_before", 2, False), ("slope_after", 2, True)]
)
def test_a_proof_without_one_of_its_masks_is_found_out(
    part: str, party: int, lies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above can fail: coefficients sent as they are, and the last values without their slopes, of which the
    second verifier's is told in the second round only."""
    monkeypatch.setattr(step_proof, "draw_randomness", _unmasked(part))
    assert _told(party, _bare, lies=lies, patch=monkeypatch)


@pytest.mark.parametrize(
    "party", [0, pytest.param(1, marks=pytest.mark.ci(__file__)), pytest.param(2, marks=pytest.mark.ci(__file__))]
)
def test_halves_that_are_released_though_something_did_not_hold_are_found_out(
    party: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above can fail for what is opened beside the verdicts: here whoever refuses releases its half, which
    with the other one is the component that the liar lacks."""
    for module in (verdicts, settling):
        monkeypatch.setattr(module, "found_true", lambda *args: True)
    told = _told(party, _bare, lies=True, patch=monkeypatch)
    assert told == [], "each half is uniform by itself"
    assert _halves_fit(party, monkeypatch)
    monkeypatch.undo()
    assert not _halves_fit(party, monkeypatch)


def _halves_fit(party: int, patch: pytest.MonkeyPatch) -> bool:
    """Whether the liar can put together what it lacks: its two halves fit the hashes that came with them."""
    seen = _received(party, SECRETS[0], 0, _bare, lies=True, patch=patch, step=False)
    size = 4 + 8 * (4 + 4) + 32
    halves = [body for bodies in seen.values() for body in bodies if len(body) == size]
    assert len(halves) == 2
    words = [torch.frombuffer(bytearray(one[4:-32]), dtype=torch.int64) for one in halves]
    digests = [bytes(held_opening.half_digest(one).numpy()) for one in words]
    return digests == [halves[1][-32:], halves[0][-32:]]
