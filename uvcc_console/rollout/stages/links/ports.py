"""Ports that workers will listen on, chosen on their pods before the workers start.

They are looked for below the range from which the system takes the ports of outgoing connections, so that none of
those takes one in the meantime, and all of one host at once. Neither pods which share a host nor two runs that start
there at the same time get the same.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final

from uvcc_console.rollout.context import Member, all_of
from uvcc_engine.contract.errors import UnreachableError, UvccError
from uvcc_engine.contract.parsing.untrusted import json_of

LINKS: Final = range(20_000, 28_000)
MASTERS: Final = range(28_000, 32_000)
LOOPBACK: Final = "127.0.0.1"
_SHOWN: Final = 80  # characters of an answer that cannot be read

# prints free ports of a range; for a minute whoever asks in this way gets others (see uvcc_engine's free_ports)
_FREE = """
import random, socket, sys
address, count, low, high = sys.argv[1], *map(int, sys.argv[2:])
found = []
for port in random.sample(range(low, high), high - low):
    if len(found) == count:
        break
    with socket.socket() as door, socket.socket() as visitor:
        try:
            door.bind((address, port))
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.listen(1)
            visitor.connect(("127.0.0.1", port))
            inside, _ = door.accept()
        except OSError:
            continue
        inside.close()
        visitor.recv(1)
        found.append(port)
print(*found)
"""


def python_of(member: Member) -> str:
    """The pod's Python, quoted for its shell."""
    return shlex.quote(member.boot.python if member.boot else "python3")


def host_of(member: Member) -> str:
    """The address that other machines know a pod by. Raises UnreachableError if it has none yet."""
    if member.pod is None or not member.pod.host:
        raise UnreachableError(f"pod {member.name} has no address yet", "provision it first")
    return member.pod.host


def listening(member: Member) -> str:
    """The address a worker listens on: of this machine only, if the pod is on it."""
    return LOOPBACK if host_of(member) == LOOPBACK else "0.0.0.0"


def fields_of(member: Member, said: str) -> dict[str, Any]:
    """What a pod answered as JSON, by name. Raises UnreachableError for what is no such answer."""
    try:
        found = json_of(said)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise no_answer(member, said)
    return found


def no_answer(member: Member, said: str) -> UnreachableError:
    """That a pod answered otherwise than it was asked."""
    what = f"pod {member.name} does not answer as asked: {said[:_SHOWN]!r}"
    return UnreachableError(what, "does its shell print something by itself? is its Python whole?")


async def free_ports(counts: Mapping[str, int], members: Mapping[str, Member], among: range) -> dict[str, list[int]]:
    """So many free ports for each named pod. Raises UvccError if a host has too few."""
    by_host: dict[str, list[str]] = {}
    for name in counts:
        by_host.setdefault(host_of(members[name]), []).append(name)

    async def ask(names: list[str]) -> dict[str, list[int]]:
        first, total = members[names[0]], sum(counts[n] for n in names)
        command = f"{python_of(first)} -S - {listening(first)} {total} {among.start} {among.stop}"
        said = await first.ssh.sh(command, stdin=_FREE.encode())
        try:
            found = [int(p) for p in said.split()]
        except ValueError as e:
            raise no_answer(first, said) from e
        if len(found) < total:
            raise UvccError(
                f"only {len(found)} of {total} ports are free on {host_of(first)}", "end what listens there"
            )
        return {name: [found.pop() for _ in range(counts[name])] for name in names}

    merged: dict[str, list[int]] = {}
    for part in await all_of(ask(names) for names in by_host.values()):
        merged |= part
    return merged
