"""What a newcomer gets wrong about a relay is answered by what to do about it, at real relays with and without TLS."""

from __future__ import annotations

import datetime
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from relaykit import TOKENS, relay_of

from uvcc_console.halt.relay_path import RelayMailbox
from uvcc_engine.contract.errors import UnreachableError


def _certificate(folder: Path) -> None:
    """Of 127.0.0.1 alone, in ``cert.pem``; its key in ``key.pem``."""
    key = ed25519.Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "relay")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day)
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = made.add_extension(here, critical=False)
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(secret)
    (folder / "cert.pem").write_bytes(made.sign(key, None).public_bytes(pem))


@pytest.fixture
def urls(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A relay with a certificate, one without, and a port at which nobody listens."""
    people = [{"party": 0, "group": "g", "token": TOKENS[0]}]
    with ExitStack() as stack:
        for kind in ("sealed", "plain"):
            (tmp_path / kind).mkdir()
        _certificate(tmp_path / "sealed")
        tls = {"tls_cert": "cert.pem", "tls_key": "key.pem"}
        sealed = stack.enter_context(relay_of(tmp_path / "sealed", people, **tls))
        plain = stack.enter_context(relay_of(tmp_path / "plain", people))
        bound = stack.enter_context(socket.socket())
        bound.bind(("127.0.0.1", 0))
        yield {"sealed": sealed, "plain": plain, "nobody": f"http://127.0.0.1:{bound.getsockname()[1]}"}


def test_each_mistake_about_a_relay_has_a_cure_of_its_own(urls: dict[str, str], tmp_path: Path) -> None:
    ca, good = str(tmp_path / "sealed" / "cert.pem"), TOKENS[0]
    assert RelayMailbox(urls["sealed"], "g", "r", (good,), ca).exchange(None, "") == []
    assert RelayMailbox(urls["plain"], "g", "r", (good,)).exchange(None, "") == []
    elsewhere = urls["sealed"].replace("127.0.0.1", "localhost")
    mistakes = (
        (urls["sealed"], good, "", "--ca-file takes its certificate, from whoever runs the relay"),
        (elsewhere, good, ca, "use the address that its certificate names"),
        (urls["sealed"].replace("https:", "http:"), good, "", "does it speak https://?"),
        (urls["plain"].replace("http:", "https:"), good, "", "does it speak http:// and not https://?"),
        (urls["plain"], "somebody-else-s-token", "", "is it the token that this relay's operator gave you?"),
        (urls["nobody"], good, "", "does it run there, and is its port open from here?"),
    )
    for url, token, trusted, wanted in mistakes:
        with pytest.raises(UnreachableError, match="cannot be used: ") as told:
            RelayMailbox(url, "g", "r", (token,), trusted).exchange(None, "")
        assert told.value.hint.startswith(wanted), (url, told.value)
        assert url in told.value.what
