"""What a party keeps of the products of a step, so that they can be proved before anything is opened (``proofs``).

A ledger is a party's own notes: what it put into a product, what it sent, what it received. Recording sends nothing.
All parties file the same claims in the same order, because they run the same program.

The runtime asks it before every message, and it lets no opening go while a claim is left to prove; one of
``everything`` lets no message go that no claim covers, and refuses a protocol that filed none for what it sent. A party
of several workers has a ledger at each, and an opening waits for the proofs of all of them (``sisters``), not only for
those of the worker that opens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final

from torch import Tensor

from uvcc_engine.contract.errors import ConfigError, ProofFailedError
from uvcc_engine.contract.job.proof_mode import Proving
from uvcc_engine.mpc.foundation.bilinear_claims import BilinearClaim
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.transcript.formats import kinds

MATMUL: Final = "matmul"  # [m, k] @ [k, n], or several at once: [.., m, k] @ [.., k, n]
ELEMENTWISE: Final = "elementwise"  # broadcasting
SUMMED: Final = "summed"  # entry by entry of [..., k], then added up along the last axis
LINEAR: Final = "linear"  # a public integer times one share
PATCHES: Final = "patches"  # [m positions, k] @ [k, patch], patches added up to m images: a convolution's transpose


@dataclass(slots=True, eq=False)
class TruncationNotes:
    """One party's part of a proved truncation (``proved_truncation``); None for what it must not know.

    The mask, the dealer's own summand inverted, is ``p + q``, and ``a ^ b`` what is carried out of every bit of it:
    left knows ``p`` and ``a``, right ``q`` and ``b``. ``w_*``: what hides the upper bits in the output. ``k_*`` and
    ``m_*``: summands modulo 2^s. ``part_*``: what the online parties sent each other. ``opened``: the masked value.
    """

    s: int
    p: Tensor | None = None
    q: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    w_left: Tensor | None = None
    w_right: Tensor | None = None
    k_left: Tensor | None = None
    k_right: Tensor | None = None
    m_left: Tensor | None = None
    m_right: Tensor | None = None
    part_left: Tensor | None = None
    part_right: Tensor | None = None
    opened: Tensor | None = None


@dataclass(slots=True, eq=False)
class ProductNotes:
    """One party's part of ``factor * form(x, y)``, its own summand ``z`` and those that it received, by sender.

    ``own`` and ``following``: its draws of the components ``party`` and ``party + 1`` for the zero share. ``dealer``:
    of the truncation that follows, None where the summands are reshared. ``cut``: of ``PATCHES``, the public linear map
    whose transpose adds patches up: ``[n, image]`` to ``[n positions, patch]``. ``whole``: one object for all slices of
    the rows of a matrix product, which have one right factor. ``settled``: whether all messages of it were sent and
    received, at every party.
    """

    form: str
    x: Share
    y: Share | None
    factor: int
    dealer: int | None
    own: Tensor
    following: Tensor
    z: Tensor
    received: dict[int, Tensor] = field(default_factory=dict)
    truncation: TruncationNotes | None = None
    cut: Callable[[Tensor], Tensor] | None = None
    whole: object | None = None
    settled: bool = False

    @property
    def count(self) -> int:
        """How many entries the product has."""
        return self.z.numel()

    @property
    def words(self) -> int:
        """About how many words a party keeps for it: public."""
        kept = _KEPT if self.truncation is None else _KEPT_TRUNCATED
        return kept * self.count + 2 * (self.x.n + (0 if self.y is None else self.y.n))


@dataclass(frozen=True, slots=True)
class ProvedStep:
    """What a proof covered: claims (products with their truncations, and equations), and the entries of the three
    provers' vectors, of numbers and of bits.

    ``digest``: of the claims, as far as they are public: forms, shapes, factors, dealers, shifts; provers and terms of
    equations. ``coins``: of the
    verifiers' coins, without those that no prover is told. ``drawn``: where steps are audited, what each prover's coins
    drew (``audit_draws``). All are the same at all three parties.
    """

    claims: int
    entries: tuple[int, ...]
    digest: bytes
    coins: bytes
    drawn: tuple[int, ...] = ()


class _Homeward:
    """Copies what lies on a device to the host, each tensor once: claims have many in common."""

    def __init__(self) -> None:
        self._brought: dict[int, tuple[Tensor, Tensor]] = {}  # each beside its own, which so keeps its address

    def tensor(self, x: Tensor) -> Tensor:
        if id(x) not in self._brought:
            self._brought[id(x)] = x, x.cpu()
        return self._brought[id(x)][1]

    def notes(self, one: ProductNotes) -> ProductNotes:
        brought = replace(
            one,
            x=one.x.map(self.tensor),
            y=one.y and one.y.map(self.tensor),
            own=self.tensor(one.own),
            following=self.tensor(one.following),
            z=self.tensor(one.z),
            received={sender: self.tensor(x) for sender, x in one.received.items()},
        )
        if one.truncation is not None:
            brought.truncation = TruncationNotes(one.truncation.s)
            for place in fields(one.truncation):
                if isinstance(held := getattr(one.truncation, place.name), Tensor):
                    setattr(brought.truncation, place.name, self.tensor(held))
        return brought

    def equation(self, one: BilinearClaim) -> BilinearClaim:
        def side(known: Sequence[Tensor] | None) -> Sequence[Tensor] | None:
            return None if known is None else [self.tensor(x) for x in known]

        def own(known: Tensor | None) -> Tensor | None:
            return None if known is None else self.tensor(known)

        return replace(
            one,
            before=side(one.before),
            after=side(one.after),
            own_before=own(one.own_before),
            own_after=own(one.own_after),
        )


_OF_THE_PROOF: Final = (kinds.PROOF, kinds.COIN, kinds.AUDIT, kinds.FINDING)


def needs_claim(kind: int, data: Tensor) -> bool:
    """Whether a message of ``kind`` with these numbers, of any shape, has to be covered by claims where its round is
    said to be proved. Those of a proof are not, nor the zeros of an opening that is withheld."""
    return kind not in _OF_THE_PROOF and (kind != kinds.OPEN or bool(data.any()))


_ENTRIES_A_CLAIM: Final = 2  # of messages, at most: 4/3 is what the dealer of a truncation sends for each of its output


_KEPT, _KEPT_TRUNCATED = 4, 11


class ClaimLedger:
    """The claims of one party and stream that are not proved yet."""

    def __init__(
        self, *, everything: bool = False, sisters: bool = False, committed: bool = True, audit_one_in: int = 0
    ) -> None:
        """``everything``: not only products are proved, but every message. ``sisters``: other workers of the party
        compute parts of the same step, and nothing is opened before :meth:`all_proved`. ``committed``: both holders
        checked every component of what came from outside against one commitment. ``audit_one_in``: each party proves
        one step in so many, as its verifiers draw; 0: every one.
        """
        self.everything, self.sisters, self._committed = everything, sisters, committed
        self.audit_one_in = audit_one_in
        self.audits: tuple[int, ...] = ()
        """Whose proofs are due in an audit that has begun and is not over."""
        self.defers = False
        """Whether whoever drives the steps has the verdicts of one that opens nothing heard later (``unheard``)."""
        self.owes = False
        """Whether the verdicts of a step before were not heard yet."""
        self.unheard: Callable[[], None] | None = None
        """Has them heard: what :meth:`hear` calls."""
        self.filed = 0
        """Entries of all that was filed so far, proved or not."""
        self.settled_words = 0
        """About how many words a party keeps for claims whose messages have all arrived: the same at all parties."""
        self.instalments: list[ProvedStep] = []
        """What was proved of the step before its end (``proofs.instalments``)."""
        self.failed: ProofFailedError | None = None
        """What an instalment found, where it is raised at the step's end."""
        self._waits = sisters
        self._products: list[ProductNotes] = []
        self._claims: list[BilinearClaim] = []

    @classmethod
    def of(cls, proving: Proving, *, sisters: bool = False, committed: bool = True) -> ClaimLedger:
        """The ledger of a job that proves so."""
        return cls(
            everything=proving.everything,
            sisters=sisters,
            committed=committed,
            audit_one_in=proving.audit_one_in,
        )

    def file(self, notes: ProductNotes) -> ProductNotes:
        """Keep what a product will be proved with. Raises ConfigError for a product that has no proof, as one that adds
        up nothing has none: there is no entry that a coin could weigh, and what is sent of it is a message all the
        same."""
        self._waits |= self.sisters
        matrices = notes.form == PATCHES and notes.z.dim() == 2
        if notes.form == MATMUL and notes.y is not None:
            matrices = notes.z.dim() >= 2 and notes.x.shape[:-2] == notes.y.shape[:-2] == notes.z.shape[:-2]
        elif notes.form == SUMMED and notes.y is not None:
            matrices = notes.x.shape == notes.y.shape and notes.x.shape[:-1] == notes.z.shape
        over_nothing = notes.form in (MATMUL, SUMMED, PATCHES) and notes.x.n == 0 and notes.count > 0
        if over_nothing or not (matrices or notes.form in (ELEMENTWISE, LINEAR)):
            raise ConfigError(
                f"a product {notes.form or 'of its own kind'} of shape {tuple(notes.z.shape)} has no proof",
                "verify: off, or a model of dense and convolutional layers",
            )
        self._products.append(notes)
        self.filed += notes.count
        return notes

    def settle(self, notes: ProductNotes) -> None:
        """All messages of a product have been sent and received: every party says so in the same round."""
        notes.settled = True
        self.settled_words += notes.words

    def claim(self, *claims: BilinearClaim) -> None:
        """Keep equations that will be proved. Raises ConfigError for one without a product, of which the proof would
        have no entry: what no party multiplies is a product with ones."""
        if any(one.terms < 1 for one in claims):
            raise ConfigError("an equation without a product has no proof", "file it with a term, such as of ones")
        self._waits |= self.sisters
        self._claims += claims
        self.filed += sum(one.count for one in claims)
        self.settled_words += sum(one.words for one in claims)

    @property
    def copies_agree(self) -> bool:
        """Whether two parties that follow the protocol hold the same copies, as long as what they opened agrees: no
        third one can have told them different things of something that is neither proved nor compared. An earlier step
        that was not audited may have been false."""
        return self.everything and not self.audit_one_in and self._committed and not self.sisters

    @property
    def last(self) -> ProductNotes:
        """The product that was filed last."""
        return self._products[-1]

    def bring_to_host(self) -> None:
        """Copy what was filed on a device to the host's memory, where proofs are computed."""
        bring = _Homeward()
        self._products = [bring.notes(one) for one in self._products]
        self._claims = [bring.equation(one) for one in self._claims]

    def take(self) -> tuple[list[ProductNotes], list[BilinearClaim]]:
        """All products and equations since the last call, each in the order in which they were filed, but for those
        of no number, of which nothing was sent."""
        found = [one for one in self._products if one.count], [one for one in self._claims if one.count]
        self._products, self._claims, self.settled_words = [], [], 0
        return found

    def take_settled(self) -> ClaimLedger:
        """A ledger of all claims whose messages have all arrived; this one keeps the others."""
        found = ClaimLedger(everything=self.everything, sisters=self.sisters, committed=self._committed)
        products, claims = self.take()
        found._products, found._claims = [one for one in products if one.settled], claims
        self._products = [one for one in products if not one.settled]
        return found

    def take_in(self, other: ClaimLedger) -> None:
        """Keep what another ledger of this worker holds, after all that is here; that one is then empty."""
        products, claims = other.take()
        self._products += products
        self._claims += claims
        self.instalments += other.take_instalments()
        self._waits |= self.sisters

    def take_instalments(self) -> list[ProvedStep]:
        """What was proved of the step before its end, once."""
        found, self.instalments = self.instalments, []
        return found

    def hear(self) -> None:
        """Have the verdicts of the step before heard, where they were not: before the first message of this one is
        taken in, and before its proof. Raises what ends the step before."""
        if self.unheard is not None:
            unheard, self.unheard = self.unheard, None
            unheard()

    def hold_openings(self) -> None:
        """Another ledger of this worker gets claims: nothing is opened before :meth:`all_proved`."""
        self._waits = True

    def all_proved(self) -> None:
        """What was filed is proved, and so is what the party's other workers filed up to the same place."""
        self._waits = False

    def check_message(self, kind: int, *, proved: bool, opening: bool) -> None:
        """Refuse (ConfigError) an opening before what it depends on is proved, or a message of ``kind`` that nothing
        would prove where everything is to be."""
        if opening and (len(self) or self._waits):
            waits = f"{len(self)} claims" if len(self) else "the claims of this party's other workers or passes"
            raise ConfigError(
                f"something would be opened before {waits} that it may depend on are proved",
                "report this: it is a defect",
            )
        if opening or not self.everything or kind in _OF_THE_PROOF:
            return
        if not proved:
            raise ConfigError(
                f"a message of kind {kinds.NAMES.get(kind, kind)} has no proof",
                "verify: products, or a job that can be proved whole",
            )

    def check_promises(self, promised: int, filed: int) -> None:
        """Refuse (ConfigError) a protocol that said of ``promised`` entries of its messages that claims cover them, and
        has filed claims of ``filed`` entries: nobody's word but this one's is taken for it, and a receiver that
        files nothing proves nothing."""
        if self.everything and promised > _ENTRIES_A_CLAIM * filed:
            raise ConfigError(
                f"{promised} numbers were sent as proved, and claims of {filed} cover them",
                "report this: it is a defect; a protocol that sends what it says is proved files a claim of it",
            )

    def __len__(self) -> int:
        return len(self._products) + len(self._claims)
