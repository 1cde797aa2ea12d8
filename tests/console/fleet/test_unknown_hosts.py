"""A host name without an address is named in what the console says of a pod, a provider and the relay."""

from __future__ import annotations

import socket

import asyncssh
import pytest

from uvcc_console.fleet.cloud.clock import WallClock
from uvcc_console.fleet.prime.client import PrimeClient
from uvcc_console.fleet.prime.key import Account
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.halt.relay_path import RelayMailbox
from uvcc_engine.contract.errors import UvccError

NAMED = "no host is called pod"


class Soon(WallClock):
    """No time passes between two tries."""

    async def sleep(self, seconds: float) -> None:
        return


@pytest.fixture(autouse=True)
def no_such_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own error, without a name server that may be slow or lie."""

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)


async def test_a_pod() -> None:
    link = PodLink("p0r0", "root@pod.exmaple:22", asyncssh.generate_private_key("ssh-ed25519"))
    with pytest.raises(UvccError, match=NAMED):
        await link.connect()


async def test_a_provider() -> None:
    calls = PrimeClient(Account("key", "https://pod.exmaple"), clock=Soon())  # it tries again, and waits for nobody
    with pytest.raises(UvccError, match=NAMED):
        await calls.whoami()
    await calls.close()


def test_the_relay_of_the_halt() -> None:
    box = RelayMailbox("http://pod.exmaple:8443", "g", "r.full", ("token",))
    with pytest.raises(UvccError, match=NAMED):
        box.exchange(None, "")
    with pytest.raises(UvccError, match=NAMED):
        box.request("/mail", {})
