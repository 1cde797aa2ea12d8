"""Who of a party's ranks will not come: noticed, and passed on, before anybody waits for them in vain.

Ranks on one machine see each other's end by a name in Linux' abstract socket space, which goes with its process however
that ends; a rank that gives up says so at the meeting place. Both only matter until all have met: afterwards a lost
sister fails the collective that misses her.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from uvcc_engine.contract.errors import PeerLostError
from uvcc_engine.contract.job.rank_waits import GROUP_TIMEOUT_VARIABLE
from uvcc_engine.parallel import meeting
from uvcc_engine.parallel.meeting import SealedMeeting
from uvcc_engine.parallel.party_keys import PartyKeys
from uvcc_engine.parallel.place import RankAddress
from uvcc_engine.parallel.sealed_stream import StrangerError

LOOK_S: Final = 0.5
GONE: Final = "word"
HEARD: Final = "heard"
WORD_S: Final = 10.0
"""For so long a first rank, who serves the meeting place, stays there to tell the others."""
REACH_S: Final = 15.0
"""For so long another one looks for the meeting place."""
_ANSWER_S: Final = 3.0
_WORD_BYTES: Final = 400
_NAMED: Final = 8  # ranks that an error names


class Presence:
    """This rank's name, and a look at the next rank and the first one: a ring in which somebody misses everybody."""

    def __init__(self, meeting: str, rank: int, world: int, party: int) -> None:
        """``meeting``: the address of the party's meeting place, which no other launch shares."""
        self._meeting, self._party = meeting, party
        self._watched = {(rank + 1) % world, 0} - {rank}
        self._seen: set[int] = set()
        self._missed: set[int] = set()
        self.lost: list[int] = []
        self.own_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.own_socket.bind(self._name(rank))
            self.own_socket.listen(1)
        except OSError:
            self._watched = set()  # no such names here, or a rank of another network has this one: nothing to see

    def _name(self, rank: int) -> str:
        return f"\0uvcc/{self._meeting}/{self._party}/{rank}"

    def look(self) -> None:
        """Raise PeerLostError if a watched rank was here and is gone, now and the last time this was asked.

        One that met the others leaves, too: then whoever still asks finds them complete before it asks again.
        """
        for rank in self._watched:
            if self._here(rank):
                self._seen.add(rank)
                self._missed.discard(rank)
            elif rank in self._missed:
                self.lost.append(rank)
                raise lost_before(rank, self._party, "it was here, and has left before all had met")
            elif rank in self._seen:
                self._missed.add(rank)

    def _here(self, rank: int) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            code = probe.connect_ex(self._name(rank))
        return code in (0, errno.EAGAIN)  # it listens; nobody takes the calls

    def close(self) -> None:
        self.own_socket.close()


def lost_before(rank: int, party: int, why: str) -> PeerLostError:
    """The error of whoever waits for a rank that will not come."""
    return PeerLostError(f"rank {rank} of P{party} will not come to the meeting: {why}", "see its log", party=party)


def unmet(place: RankAddress, waited_s: float, error: BaseException) -> PeerLostError:
    """The error of a rank that found no meeting place: nothing is known of the first rank, who would have been it."""
    reason, party = " ".join(str(error).split())[:300], place.coord.party
    if place.rank == 0:
        return PeerLostError(f"{place.coord} cannot be its party's meeting place: {reason}", "see its log", party=party)
    if isinstance(error, StrangerError):
        what = f"{place.coord} is not let in where its party meets: {reason}"
        return PeerLostError(what, "was one of the two pods started for another run?", party=party)
    return not_come(place, waited_s, [0], reason=reason)


def not_come(
    place: RankAddress, waited_s: float, ranks: Sequence[int], *, met: bool = False, reason: str = ""
) -> PeerLostError:
    """The error of a rank that waited for others in vain: whom nobody has heard may only be late.

    ``met``: all had been there before.
    """
    party, size = place.coord.party, place.topology
    named = {size.local_rank(c): str(c) for c in size.coords() if c.party == party}
    who = ", ".join(named.get(rank, f"rank {rank}") for rank in ranks[:_NAMED])
    who += f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    how, hint = "said nothing", "look at the logs of their workers"
    if not met:
        how, hint = "have not started yet, or cannot be reached", "are their pods up?"
        hint += f" {GROUP_TIMEOUT_VARIABLE}, which the profile's env may raise, is how long they are waited for"
    what = f"{place.coord} waited {waited_s:g} s for sister ranks that {how}: {who}{f' ({reason})' if reason else ''}"
    return PeerLostError(what, hint, party=party)


def read_withdrawal(store: Any, rank: int, party: int) -> PeerLostError | None:
    """What a rank said at the meeting place before it gave up, which ``rank`` has heard now; None if nobody did."""
    if not store.check([GONE]):
        return None
    # whoever reaches the meeting place can write there: what it says is short and clean before it stands in a log
    said = bytes(store.get(GONE))[:_WORD_BYTES].decode(errors="replace")
    with contextlib.suppress(RuntimeError):  # read first: the place may close as soon as all have heard
        store.set(f"{HEARD}/{rank}", "")
    who, _, why = "".join(c if c.isprintable() else " " for c in said).partition(" ")
    return lost_before(int(who) if who.isascii() and who.isdecimal() and len(who) < 7 else -1, party, why)


def post_withdrawal(store: Any, rank: int, why: str, *, lost: Iterable[int] = ()) -> None:
    """Say at the meeting place that this rank gives up. The first word stays; harmless if the place is gone.

    Nobody needs to wait for this rank to hear it, nor for those that are ``lost``.
    """
    try:
        store.set_timeout(timedelta(seconds=_ANSWER_S))  # its process may stand still
        for heard in (rank, *lost):
            store.set(f"{HEARD}/{heard}", "")
        if store.add(f"{GONE}/first", 1) == 1:
            store.set(GONE, f"{rank} {why}")
    except RuntimeError:
        return  # the place is gone, which the others notice by themselves


def serve_withdrawal(store: Any, world: int, stay_s: float = WORD_S) -> None:
    """Keep the meeting place open until all ranks have heard the word, or for ``stay_s``.

    For the first rank: whoever comes later than it leaves would look for the place in vain.
    """
    pause, end, ranks = threading.Event().wait, time.monotonic() + stay_s, [f"{HEARD}/{rank}" for rank in range(world)]
    try:
        while not store.check(ranks) and time.monotonic() < end:
            pause(0.05)
    except RuntimeError:
        return  # the place is gone


class _Place(NamedTuple):
    address: str
    port: int
    rank: int


def withdraw(env: Mapping[str, str], why: str, *, stay_s: float = WORD_S, keys: PartyKeys | None = None) -> None:
    """Tell the sister ranks of a rank that failed before it met them. Does nothing where there are none.

    ``env``: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. The first rank, who would have been the meeting place, is one
    for ``stay_s`` seconds or until all have heard; another one looks for the place for ``REACH_S`` seconds. Ranks that
    have the party's ``keys`` hear only who has them, too.
    """
    rank, world = env.get("RANK", "0"), env.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world.isdecimal() and int(world) > 1 and env.get("MASTER_PORT", "").isdecimal()):
        return
    place = _Place(env.get("MASTER_ADDR", ""), int(env["MASTER_PORT"]), int(rank))
    if keys is None and meeting.wants_seal(place.address):
        return
    try:
        if place.rank == 0:
            _serve_word(place, int(world), why, stay_s, keys)
        else:
            _leave_word(place, why, keys)
    except (RuntimeError, OSError):
        return  # nobody can be told


def _serve_word(place: _Place, world: int, why: str, stay_s: float, keys: PartyKeys | None) -> None:
    if keys is None:
        store = TCPStore(place.address, place.port, None, True, timedelta(seconds=stay_s), False)
        post_withdrawal(store, 0, why)
        serve_withdrawal(store, world, stay_s)
        return
    met = SealedMeeting.serve(place, keys, stay_s, lambda name, fields: None)
    try:
        post_withdrawal(met.store, 0, why)
        serve_withdrawal(met.store, world, stay_s)
    finally:
        met.close()


def _leave_word(place: _Place, why: str, keys: PartyKeys | None) -> None:
    def look_again() -> None:
        threading.Event().wait(0.1)

    if keys is None:
        store = meeting.join_local(place, REACH_S, look_again)
        post_withdrawal(store, place.rank, why)
        return
    # a pod that was started with the keys of another pod is heard as a rank of that one
    shown = place._replace(rank=keys.rank_to_show(place.rank))
    sealed = meeting.join_store(shown, keys, REACH_S, look_again)
    try:
        post_withdrawal(sealed, place.rank, why)
    finally:
        sealed.close()
