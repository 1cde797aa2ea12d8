"""What the parties sign after a proof that failed: whom each suspects, and what a reader may conclude from all three.

A file ``finding_<coord>.json`` holds the policy and the records that one worker has, its own and those of its peers at
the same place. Each is signed by the key that the policy names for that party. "One of S lied" binds nobody but who
signs it: it means one of S, or who says so. So whoever is in all statements may have lied, and nobody else, for a
reader who trusts that at most one of the three did. Two that name the same party therefore convict it: one of them is
honest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.run_files.files import write_json
from uvcc_engine.contract.text import clean
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.formats.reading import parse_json
from uvcc_engine.transcript.signed import orders
from uvcc_engine.transcript.terms.policy import Policy

NAMESPACE: Final = "uvcc-finding"
FORMAT: Final = "uvcc-finding-v1"
MOST_BYTES: Final = 4 << 20  # of a file; a policy is most of it
MOST_WHY: Final = 200
_TYPE: Final = "finding"
_MOST_FILES: Final = 3 * 4096
_MOST_FOLDERS: Final = 1 << 16


def file_name(coord: Coord) -> str:
    """The file of one worker, in its folder."""
    return f"finding_{coord}.json"


def is_name(name: str) -> bool:
    """Whether a file is called as such a file is."""
    return name.startswith("finding_p") and name.endswith(".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedFinding:
    """A worker's statement. ``policy``: the hash; ``epoch``: whose proofs failed; ``suspects``: parties of whom one
    lied, or who signs; empty where by its own numbers it is the signer; ``why``: what the only one did, in words."""

    policy: str
    coord: str
    attempt: int
    epoch: int
    suspects: list[int]
    why: str
    version: int = 1

    def __post_init__(self) -> None:
        if self.version != 1 or len(self.policy) != 64 or set(self.policy) - set("0123456789abcdef"):
            raise ConfigError("a finding of another version, or about no policy", "version 1; 64 hex digits")
        if self.party not in range(PARTIES):
            raise ConfigError(f"a finding of {self.coord}", "there are three parties: 0, 1 and 2")
        others = [p for p in range(PARTIES) if p != self.party]
        if sorted(set(self.suspects)) != self.suspects or not set(self.suspects) <= set(others):
            raise ConfigError(f"a finding of {self.coord} that suspects {self.suspects}", "other parties, in order")
        if not 0 <= self.attempt < 1 << 31 or not 0 <= self.epoch < 1 << 32:
            raise ConfigError("a finding of no attempt or epoch", "whole numbers from 0")
        if self.why != clean(self.why, MOST_WHY):
            raise ConfigError("a finding whose words cannot be shown", "one printable line")

    @property
    def party(self) -> int:
        """Who signs. Raises ConfigError if the coordinate is none."""
        return Coord.parse(self.coord).party

    @property
    def place(self) -> tuple[str, int, int, str]:
        """What three statements must have in common to be about the same failure."""
        c = Coord.parse(self.coord)
        return self.policy, self.attempt, self.epoch, f"r{c.replica}s{c.stage}t{c.tensor}"


def signed(finding: SignedFinding, sign: Callable[[bytes], str]) -> str:
    """The record. ``sign`` signs under ``NAMESPACE``."""
    return orders.sealed({"type": _TYPE, **asdict(finding)}, sign)


def opened(body: str, policy: Policy) -> SignedFinding | None:
    """The statement, if the worker that it names signed it, by the key of this policy; None for anything else."""
    try:
        coord = Coord.parse(parse_json(body.encode(), "a finding")["content"]["coord"])
        key = policy.public(coord.party, coord.replica).ed25519
    except (UnreadableError, ConfigError, KeyError, TypeError, IndexError, ValueError, AttributeError):
        return None
    content = orders.opened(body, NAMESPACE, [key])
    if content is None or content.pop("type", "") != _TYPE:
        return None
    try:
        found = strict.read(SignedFinding, content, "a finding")
    except ConfigError:
        return None
    return found if found.policy == policy.hash.hex() else None


def write(path: Path, policy: Policy, records: Iterable[str]) -> None:
    """Replace the file of a worker. Raises UvccError if the disk refuses."""
    write_json(path, {"format": FORMAT, "policy": policy.to_json(), "records": list(records)})


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What a reader may conclude of one failure who trusts that at most one party lied.

    ``stated``: by party, whom it suspects by its signed word; ``open_to``: who may have lied; ``why``: of each party
    that names one, what that one did.
    """

    place: str
    attempt: int
    epoch: int
    stated: Mapping[int, tuple[int, ...]]
    open_to: tuple[int, ...]
    why: Mapping[int, str]
    policy: str

    def lines(self) -> list[str]:
        """The same in words."""
        where = f"{self.place}, epoch {self.epoch}, attempt {self.attempt}"
        found = [f"a proof failed at {where}, under policy {self.policy[:12]}; nothing of the epoch was revealed"]
        for party, names in sorted(self.stated.items()):
            if not names:
                found.append(f"P{party} signed that its own statement does not hold by what it holds itself")
            else:
                who = " or ".join(f"P{p}" for p in names)
                found.append(f"P{party} signed that {who} lied" + (f": {self.why[party]}" if self.why[party] else ""))
        found += [f"P{p} signed nothing that lies here" for p in range(PARTIES) if p not in self.stated]
        if len(self.open_to) == 1:
            sure = "it follows, if at most one of the three domains is corrupt:"
            found.append(f"{sure} P{self.open_to[0]} lied, or computes wrongly")
        elif len(self.open_to) == 2:
            a, b = self.open_to
            cleared = next(p for p in range(PARTIES) if p not in self.open_to)
            found.append(f"P{a} or P{b} lied, which of them cannot be told; P{cleared} did not, if at most one did")
        elif self.open_to:
            found.append("who lied does not follow from what is signed here")
        else:
            found.append("these statements fit no single liar: at least two of the three domains lied")
        return found


def concluded(findings: Iterable[SignedFinding]) -> list[Conclusion]:
    """By failure, what follows from the statements about it. Who signed two that differ counts as who suspects nobody:
    an honest party signs one, since an attempt ends with it."""
    by_place: dict[tuple[str, int, int, str], dict[int, SignedFinding | None]] = {}
    for one in findings:
        there = by_place.setdefault(one.place, {})
        there[one.party] = one if there.get(one.party, one) == one else None
    found = []
    for (policy, attempt, epoch, place), stated in sorted(by_place.items()):
        names = {p: tuple(one.suspects) if one is not None else () for p, one in stated.items()}
        why = {p: one.why if one is not None else "" for p, one in stated.items()}
        left = tuple(c for c in range(PARTIES) if all(c == p or c in said for p, said in names.items()))
        found.append(Conclusion(place, attempt, epoch, names, left, why, policy))
    return found


def read(path: Path, expected: Policy | None = None) -> list[SignedFinding]:
    """The statements of a file that are signed as its policy says; others count for nothing.

    Raises UnreadableError for a file of another form or under another policy than ``expected``.
    """
    try:
        whole = strict.exact(
            parse_json(reading.read_file(path, MOST_BYTES), path.name), ("format", "policy", "records"), path.name
        )
        policy = Policy.from_json(whole["policy"])
    except ConfigError as e:
        raise UnreadableError(f"{reading.shown(path)}: {e.what}", "fetch it again") from e
    if whole["format"] != FORMAT or not isinstance(whole["records"], list):
        raise UnreadableError(f"{reading.shown(path)} is no file of findings", f"its format must be {FORMAT}")
    if expected is not None and expected.hash != policy.hash:
        raise UnreadableError(f"{reading.shown(path)} is about another policy than the expected one", "name its own")
    bodies = [body for body in whole["records"][:PARTIES] if isinstance(body, str)]
    return [one for body in bodies if (one := opened(body, policy)) is not None]


def below(root: Path) -> list[Path]:
    """The files of findings in a folder and those below it, sorted; links are not followed. Bounded."""
    found: list[Path] = []
    for number, (folder, inner, names) in enumerate(os.walk(root)):
        inner.sort()
        found += [Path(folder) / n for n in sorted(names) if is_name(n)]
        if number >= _MOST_FOLDERS or len(found) >= _MOST_FILES:
            break
    return found


def told(root: Path, expected: Policy | None = None) -> list[Conclusion]:
    """What follows from all findings in a folder, or from one file. In a folder a file that cannot be read counts for
    nothing, since anybody may have put it there. Raises UnreadableError as :func:`read` for the one that is named."""
    if root.is_file():
        return concluded(read(root, expected))
    found: list[SignedFinding] = []
    for path in below(root):
        with contextlib.suppress(UnreadableError):
            found += read(path, expected)
    return concluded(found)


def report(value: Iterable[Conclusion]) -> list[dict[str, Any]]:
    """For a program: one object for each failure."""
    return [
        {
            "place": one.place,
            "attempt": one.attempt,
            "epoch": one.epoch,
            "policy": one.policy,
            "stated": {str(p): list(names) for p, names in one.stated.items()},
            "open_to": list(one.open_to),
        }
        for one in value
    ]
