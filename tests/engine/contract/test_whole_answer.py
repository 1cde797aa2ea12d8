"""A relay that sends a byte now and then holds nobody who asks it for longer than is said."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from uvcc_engine.contract.errors import UnreachableError
from uvcc_engine.contract.peer_protocol import whole_answer
from uvcc_engine.contract.peer_protocol.whole_answer import limited
from uvcc_engine.plane.links import relay_mail
from uvcc_engine.plane.links.relay_mail import RelayMail

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"


@contextmanager
def _relay(head: bytes, drops: bytes) -> Iterator[int]:
    """Answers each request with ``head``, and then with ``drops`` one after the other, for ever; its port."""
    over = threading.Event()

    def serve(server: socket.socket) -> None:
        while not over.is_set():
            try:
                taken, _ = server.accept()
            except OSError:
                return
            with taken:
                try:
                    taken.recv(1 << 16)
                    taken.sendall(head)
                    while drops and not over.wait(0.002):
                        taken.sendall(drops)
                except OSError:
                    pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            over.set()
            server.shutdown(socket.SHUT_RDWR)
            thread.join(120)


@pytest.mark.parametrize(
    ("head", "drops"), [(HEAD, b"x"), (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"), (b"HTTP/1.1 2", b"0")]
)
def test_an_answer_that_drips_ends_with_the_limit_over_all_of_it(
    head: bytes, drops: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_answer, "TIMES", 0.0025)  # of two minutes
    with _relay(head, drops) as port:
        connection = limited(http.client.HTTPConnection("127.0.0.1", port, timeout=120.0))
        connection.request("POST", "/", b"{}")
        with pytest.raises((TimeoutError, http.client.HTTPException)):
            connection.getresponse().read()
        connection.close()


def test_mail_that_drips_is_a_relay_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_answer, "TIMES", 0.0025)
    monkeypatch.setattr(relay_mail, "TIMEOUT_S", 120.0)
    with _relay(HEAD, b" ") as port, pytest.raises(UnreachableError, match="does not answer"):
        RelayMail(f"http://127.0.0.1:{port}", "token", 1).take(0.0)


def test_a_whole_answer_leaves_the_connection_as_it_was() -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    first, second = socket.socketpair()
    with first, second:
        connection = limited(http.client.HTTPConnection("127.0.0.1", timeout=120.0))
        first.settimeout(120.0)
        connection.sock = first
        for _ in range(3):
            second.sendall(whole)
            connection.request("POST", "/", b"{}")
            assert connection.getresponse().read() == b"{}"
            assert connection.sock is first
            assert first.gettimeout() == 120.0
