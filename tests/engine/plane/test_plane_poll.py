"""What a direct link's poll looks at is what the link has, whoever comes and goes, so a number is never in it twice."""

from __future__ import annotations

import os
import random
import socket
import struct

import pytest
from plane_kit import IDENTITIES, PUBLIC, SID, free_port

from uvcc_engine.plane.links import direct
from uvcc_engine.plane.links.connection import Connection
from uvcc_engine.plane.links.direct import DirectLink
from uvcc_engine.plane.links.knocking import KNOCK_BYTES, KnockAuthenticator

NO_LINGER = struct.pack("ii", 1, 0)


def door(me: int) -> KnockAuthenticator:
    return KnockAuthenticator(me, SID, lambda p: IDENTITIES[me].pair_secret(PUBLIC[p], SID, "plane-knock"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def check(link: DirectLink) -> None:
    """The poll has the two own ends, the strangers and the connections; each is open, under its own number."""
    assert link._listener is not None
    own = {link._wake, link._listener.fileno()}
    connections = [*link._active.values(), *link._guests]
    assert {c.sock.fileno(): c for c in connections} == link._by_fd
    assert {v.fd: v for v in link._lobby} == link._lobby.by_fd
    assert set(link._poll.get_map()) == own | link._by_fd.keys() | link._lobby.by_fd.keys()
    assert link._dirty <= set(connections)


@pytest.mark.parametrize("seed", range(4))
def test_the_poll_holds_what_the_link_has(seed: int) -> None:
    """Numbers of closed sockets are given again at once, so what leaves the link without leaving the poll is found."""
    rng, clock = random.Random(seed), Clock()
    low, nobody = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    link = DirectLink(1, low, {0: nobody}, clock, spins=False, door=door(1))
    peer, far, met = door(2), list[socket.socket](), False
    for _ in range(300):
        act = rng.randrange(6)
        if act < 3:
            sock = socket.create_connection(("127.0.0.1", int(low.rpartition(":")[2])))
            far.append(sock)
            knock = peer.knock(1)
            sock.sendall(
                (b"", knock[: KNOCK_BYTES // 2], knock, knock + os.urandom(64), os.urandom(99))[rng.randrange(5)]
            )
        elif act == 3 and far:
            gone = far.pop(rng.randrange(len(far)))
            if rng.random() < 0.5:
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            gone.close()
        elif act == 4 and link._guests:
            guest = rng.choice(link._guests)
            link.proven(guest.peer, guest)
            met = met or link.connected(2)
        else:
            clock.now += rng.choice((0.1, 2.0, 20.0))
        link.exchange(0.0, None)
        check(link)
    assert met, "nobody was let in"
    link.close()
    for sock in far:
        sock.close()


def test_a_peer_that_is_gone_behind_its_knock_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some systems refuse to set options of such a socket."""

    class Refusing(Connection):
        def __init__(self, sock: socket.socket, now: float, peer: int, address: str) -> None:
            raise OSError(22, "Invalid argument")

    address = f"127.0.0.1:{free_port()}"
    link = DirectLink(1, address, {}, spins=False, door=door(1))
    monkeypatch.setattr(direct, "Connection", Refusing)
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as sock:
        sock.sendall(door(2).knock(1))
        while not (told := link.notices()):
            link.exchange(1.0, None)
        assert [dict(fields)["why"] for _, fields in told] == ["left behind its knock"]
    check(link)
    link.close()
