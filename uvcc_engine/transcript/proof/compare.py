"""Two verified bundles side by side: the same job, the same data, the same run? If not, where do they part?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.transcript.proof.bundle import Bundle
from uvcc_engine.transcript.terms.policy import Policy

# what makes two jobs one: everything agreed but who computes it where, and the nonce of the attempt
_JOB: Final = ("job", "model_hash", "code_hash", "topology", "reveal")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two runs have in common. ``policy``: dotted field -> both values, where they differ.

    ``first``: where the roots differ first, as (epoch, workers), or None; ``epochs``: how many both have.
    """

    policy: dict[str, tuple[Any, Any]]
    same_job: bool
    same_data: bool
    epochs: tuple[int, int]
    first: tuple[int, tuple[str, ...]] | None
    values: dict[str, tuple[Any, Any]]
    same_results: bool

    @property
    def same_run(self) -> bool:
        """Bit by bit one run: every root and result is equal, which equal seeds and inputs alone can give."""
        return self.first is None and self.same_results and self.epochs[0] == self.epochs[1]

    def to_json(self) -> dict[str, Any]:
        return {
            "same_job": self.same_job,
            "same_data": self.same_data,
            "same_run": self.same_run,
            "same_results": self.same_results,
            "policy": {name: list(pair) for name, pair in self.policy.items()},
            "epochs": list(self.epochs),
            "first_difference": None
            if self.first is None
            else {"epoch": self.first[0], "workers": list(self.first[1])},
            "values": {name: list(pair) for name, pair in self.values.items()},
        }


def compare(one: Bundle, two: Bundle) -> Comparison:
    """Compare two bundles, both of which hold; nothing is verified here."""
    found = dict(_differences("", one.policy.to_json(), two.policy.to_json()))
    sets = [dict(b.workers[0].result[1].values) for b in (one, two)]
    names = sorted(sets[0].keys() | sets[1].keys())
    return Comparison(
        policy=found,
        same_job=all(one.policy.to_json()[name] == two.policy.to_json()[name] for name in _JOB),
        same_data=_same_data(one.policy, two.policy),
        epochs=(len(one.epochs), len(two.epochs)),
        first=_first(one, two),
        values={n: (sets[0].get(n), sets[1].get(n)) for n in names if sets[0].get(n) != sets[1].get(n)},
        same_results=list(one.result_hashes) == list(two.result_hashes),
    )


def _same_data(one: Policy, two: Policy) -> bool:
    """The very same sealed inputs of the same owner. The same rows sealed anew have other commitments."""
    return (one.owner, one.commitments) == (two.owner, two.commitments)


def _differences(where: str, one: Any, two: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(one, dict) and isinstance(two, dict):
        for key in sorted(one.keys() | two.keys()):
            yield from _differences(f"{where}.{key}" if where else key, one.get(key), two.get(key))
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for at, pair in enumerate(zip(one, two, strict=True)):
            yield from _differences(f"{where}[{at}]", *pair)
    elif one != two:
        yield where, (one, two)


def _first(one: Bundle, two: Bundle) -> tuple[int, tuple[str, ...]] | None:
    """The first epoch in which a worker that both have signed another root, and every such worker."""
    roots: list[dict[Coord, list[bytes]]] = [
        {w.coord: [s.root.root for _, s in w.roots] for w in b.workers} for b in (one, two)
    ]
    for epoch in range(min(len(one.epochs), len(two.epochs))):
        both = sorted(roots[0].keys() & roots[1].keys())
        odd = tuple(str(c) for c in both if roots[0][c][epoch] != roots[1][c][epoch])
        if odd:
            return epoch, odd
    return None
