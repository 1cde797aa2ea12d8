"""What a connection that failed says. Of a name without an address the system says ``[Errno -2] Name or service not
known``, and not which name: whoever reads it at night looks at the network, where a letter of a host is wrong.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from uvcc_engine.contract.text import clean

_CHAIN = 10  # errors that one error may stand on; more are not looked at


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    at: BaseException | None = error
    for _ in range(_CHAIN):
        if at is None:
            return
        yield at
        at = at.__cause__ or at.__context__


def _host(address: str) -> str:
    """The host of a URL, of ``user@host:port`` or of a host by itself."""
    if "://" in address:
        return urlsplit(address).hostname or address
    host, colon, port = address.rpartition("@")[2].rpartition(":")
    return host if colon and port.isdecimal() else address.rpartition("@")[2]


def why(error: BaseException, address: str) -> str:
    """What went wrong with a connection to ``address`` (a URL, a host, or a host and port), on one line.

    For a host name that has no address here it names that, and what to look at.
    """
    for one in _causes(error):
        if not isinstance(one, socket.gaierror):
            continue
        host = clean(_host(address), 80)
        if one.errno == socket.EAI_AGAIN:
            return f"the name server that would know {host} does not answer (is the network up? getent hosts {host})"
        return f"no host is called {host} here (is it spelt right? getent hosts {host} asks the name server)"
    return clean(str(error)) or type(error).__name__
