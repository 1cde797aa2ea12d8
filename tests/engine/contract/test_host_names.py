"""A host name without an address is named, with what to look at, wherever a host is connected to."""

from __future__ import annotations

import socket

import httpx
import pytest

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.machine import host_names
from uvcc_engine.plane import connect
from uvcc_engine.plane.links.relay_mail import RelayMail

UNKNOWN = "no host is called relay.exmaple here (is it spelt right? getent hosts relay.exmaple asks the name server)"


@pytest.fixture
def no_such_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own error, without a name server that may be slow or lie."""

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)


@pytest.mark.parametrize("address", ["https://relay.exmaple:8443/x", "relay.exmaple:22", "root@relay.exmaple:22"])
def test_an_unknown_name_is_named_whatever_the_address_looks_like(address: str) -> None:
    error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert host_names.why(error, address) == UNKNOWN
    wrapped = httpx.ConnectError("[Errno -2] Name or service not known")
    wrapped.__cause__ = error
    assert host_names.why(wrapped, address) == UNKNOWN


def test_a_name_server_that_is_silent_and_every_other_error_are_told_apart() -> None:
    silent = host_names.why(socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), "relay.exmaple")
    assert silent.startswith("the name server that would know relay.exmaple does not answer")
    assert host_names.why(ConnectionRefusedError(111, "Connection refused"), "h") == "[Errno 111] Connection refused"
    assert host_names.why(TimeoutError(), "h") == "TimeoutError"


@pytest.mark.usefixtures("no_such_host")
def test_the_plane_names_the_host_of_a_relay_that_is_not_there() -> None:
    with pytest.raises(UvccError, match="no host is called relay"):
        connect.health("http://relay.exmaple:8443", None)
    with pytest.raises(UvccError, match="no host is called relay"):
        RelayMail("http://relay.exmaple:8443", "token", 0).acknowledge([1])
