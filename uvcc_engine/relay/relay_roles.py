"""What each kind of person may do at a relay: whose mail it takes, which records it leaves and reads.

A token stands for one person of one group, who has a number of its own there: the parties 0 to 2, everybody else above
them. Mail, quotas, connections and records are kept by that number, so nobody reads, deletes or crowds out what is
another's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.peer_protocol import record_names as names


class Role(StrEnum):
    """The kinds of person; in the configuration, the key that says which one of its kind a token is for."""

    PARTY = "party"
    OWNER = "owner"
    COORDINATOR = "coordinator"
    AUDITOR = "auditor"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class RoleScope:
    """What a role may do. ``first`` and ``count``: its numbers in a group; ``mail``: it has a mailbox and may write to
    others'; ``writes`` and ``reads``: how the names of records begin that it may leave, and take; ``not_writes``: of
    those that it may leave, which it may not all the same; ``metrics``: it sees the relay's counters.
    """

    first: int
    count: int
    mail: bool
    writes: tuple[str, ...]
    reads: tuple[str, ...]
    not_writes: tuple[str, ...] = ()
    metrics: bool = False

    def may_write(self, name: str) -> bool:
        """Whether a record of this name may be left."""
        return name.startswith(self.writes) and not name.startswith(self.not_writes)


_SHOWN: Final = (names.OWNER_KEYS, names.OWNER_SHARES)
_OWNERS: Final = (*_SHOWN, names.OWNER_JOINS)
_AGREED: Final = (names.PROPOSALS, names.APPROVALS, names.ROSTERS)
_ADVANCED: Final = (names.BARRIERS, names.REPORTS)
SCOPES: Final[dict[Role, RoleScope]] = {
    Role.PARTY: RoleScope(0, PARTIES, mail=True, writes=("",), not_writes=_OWNERS, reads=("",), metrics=True),
    Role.OWNER: RoleScope(16, 64, mail=True, writes=_OWNERS, reads=(*_AGREED, names.OWNER_KEYS, names.OWNER_JOINS)),
    Role.COORDINATOR: RoleScope(128, 16, mail=False, writes=(names.PROPOSALS,), reads=(*_AGREED, *_ADVANCED)),
    Role.AUDITOR: RoleScope(160, 32, mail=False, writes=(), reads=(*_AGREED, *_ADVANCED, *_SHOWN, names.SIGNATURES)),
    Role.CLIENT: RoleScope(192, 64, mail=True, writes=(), reads=()),
}
_SENT_TO: Final = {Role.PARTY: (Role.OWNER, Role.CLIENT), Role.OWNER: (Role.OWNER,)}
"""Whom a role may send to beside the parties."""


def number_of(role: Role, which: int) -> int:
    """The number in its group of the ``which``-th of a role. Raises ValueError if the role has no such one."""
    scope = SCOPES[role]
    if which not in range(scope.count):
        raise ValueError(f"{role} {which!r}: 0 to {scope.count - 1}")
    return scope.first + which


def called(number: int) -> str:
    """A number of a group as people say it: ``0`` to ``2`` for the parties, ``owner-0`` and so on for the others."""
    for role, scope in SCOPES.items():
        if role is not Role.PARTY and number in range(scope.first, scope.first + scope.count):
            return f"{role}-{number - scope.first}"
    return str(number)


def may_send_to(role: Role, narrowed: Sequence[int] | None, number: int, group: Iterable[int]) -> frozenset[int]:
    """Whose mailboxes somebody may write to. A client writes to parties, an owner to parties and to the other owners, a
    party to the other parties, to the owners and to the clients; ``narrowed`` says to which parties. ``group``: the
    numbers of all of its group.
    """
    if not SCOPES[role].mail:
        return frozenset()
    parties = frozenset(narrowed) if narrowed is not None else frozenset(range(PARTIES)) - {number}
    kinds = [SCOPES[one] for one in _SENT_TO.get(role, ())]
    theirs = frozenset(group) & frozenset(n for kind in kinds for n in range(kind.first, kind.first + kind.count))
    return parties | theirs - {number}
