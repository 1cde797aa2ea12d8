"""Dated evidence: RFC 3161 time stamps of a phase's policy, taken before its first step, and of its proof bundle.

A run can be repeated and only the best one shown; a stamp of every policy before it ran, by a service that the auditor
trusts, shows how many there were and when. ``openssl ts -verify -data policy.json -in policy.json.tsr -CAfile tsa.pem``
checks one without this code. Needs rfc3161-client (extra ``timestamp``).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from uvcc_engine.contract.errors import ConfigError, UnreachableError, UnreadableError, UvccError, VerificationError
from uvcc_engine.contract.machine import host_names
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.proof.bundle import NAME, POLICY_FILE

SUFFIX: Final = ".tsr"
STAMPED: Final = (POLICY_FILE, NAME)
_QUERY: Final = {"Content-Type": "application/timestamp-query", "Accept": "application/timestamp-reply"}
_LARGEST: Final = 64 * reading.KIB
_WAIT_S: Final = 20.0
_WHOLE_S: Final = 60.0  # for the whole answer, however slowly it drips


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a service said about one file: it had these bytes at ``at`` (seconds since 1970)."""

    file: Path
    at: float

    @property
    def text(self) -> str:
        return f"{self.file.name} existed at {datetime.fromtimestamp(self.at, UTC):%Y-%m-%dT%H:%M:%SZ}"


def check_url(url: str) -> str:
    """The address of a time-stamping service. Raises ConfigError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
        raise ConfigError(
            f"no time-stamping service: {reading.shown(url, 100)!r}", "write https://host/path, no password"
        )
    return url


async def stamp(path: Path, url: str) -> Path:
    """Have a file stamped; the answer lies beside it. A stamp that is there already stays.

    Only the file's hash leaves this machine. Raises UnreachableError if the service does not answer with a stamp of
    this very hash; UvccError without rfc3161-client.
    """
    answer = path.with_name(path.name + SUFFIX)
    if answer.exists():
        return answer
    client, data = _library(), path.read_bytes()
    nonce_request = client.TimestampRequestBuilder().data(data).hash_algorithm(client.HashAlgorithm.SHA256).build()
    try:
        async with (
            asyncio.timeout(_WHOLE_S),
            httpx.AsyncClient(timeout=_WAIT_S, trust_env=False) as http,
            http.stream("POST", check_url(url), content=nonce_request.as_bytes(), headers=_QUERY) as response,
        ):
            body = b""
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > _LARGEST:
                    raise UnreachableError(
                        f"the time-stamping service {url} sends more than a stamp", "name another one"
                    )
    except (httpx.HTTPError, TimeoutError) as e:
        said = host_names.why(e, url)
        raise UnreachableError(f"the time-stamping service {url} does not answer: {said}", "try again later") from e
    if response.status_code != 200:
        raise UnreachableError(
            f"the time-stamping service {url} answers {response.status_code}", "is the address right?"
        )
    found = _parsed(body, f"the answer of {url}")
    if bytes(found.tst_info.message_imprint.message) != hashlib.sha256(data).digest():
        raise UnreachableError(f"the time-stamping service {url} stamped something else", "name another one")
    if found.tst_info.nonce is not None and found.tst_info.nonce != nonce_request.nonce:
        raise UnreachableError(f"the time-stamping service {url} answers an older question", "name another one")
    _write(answer, body)
    return answer


def check(folder: Path, authority: Path) -> list[Stamp]:
    """The stamps in a phase's folder, verified under the certificate (PEM) that the reader trusts.

    Raises VerificationError for one that does not hold, UnreadableError if there is none, or for a damaged file.
    """
    from cryptography import x509

    client = _library()
    try:
        certificates = x509.load_pem_x509_certificates(reading.read_file(authority, named=True))
    except ValueError as e:
        raise UnreadableError(f"{reading.shown(authority)} holds no certificate in PEM: {e}") from e
    builder = client.VerifierBuilder()
    for certificate in certificates:
        builder = builder.add_root_certificate(certificate)
    found = []
    for name in STAMPED:
        path, answer = folder / name, folder / (name + SUFFIX)
        if not answer.exists():
            continue
        response = _parsed(reading.read_file(answer, _LARGEST), str(answer))
        try:
            builder.build().verify(response, hashlib.sha256(reading.read_file(path, reading.LARGEST)).digest())
        except client.VerificationError as e:
            raise VerificationError("time stamp", f"{reading.shown(answer)} does not hold for {name}: {e}") from e
        found.append(Stamp(path, response.tst_info.gen_time.timestamp()))
    if not found:
        raise UnreadableError(f"{reading.shown(folder)} holds no time stamp", "set evidence.timestamp in the profile")
    return found


def _parsed(data: bytes, what: str) -> Any:
    client = _library()
    try:
        found = client.decode_timestamp_response(data)
        if found.status != client.PKIStatus.GRANTED:
            raise UnreadableError(f"{reading.shown(what)} is a refusal: {found.status}")
        _ = found.tst_info.message_imprint
    except ValueError as e:
        raise UnreadableError(f"{reading.shown(what)} is no time stamp: {reading.reason(e)}") from e
    return found


def _library() -> Any:
    try:
        import rfc3161_client
    except ImportError as e:
        raise UvccError("time stamps need rfc3161-client", "install the extra: uvcc[timestamp]") from e
    return rfc3161_client


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as e:
        raise UvccError(f"cannot write {path}: {e.strerror}", "free disk space and repeat") from e
