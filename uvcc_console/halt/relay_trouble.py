"""What to do about a relay that cannot be used, by what went wrong with it."""

from __future__ import annotations

import http.client
import ssl
from typing import Final

_MISMATCH: Final = 62, 64
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL."""


class RelayRefused(ValueError):
    """A relay answered, and not with what was asked for."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(f"HTTP {status}{why}")
        self.status = status


def cure(error: BaseException, url: str) -> str:
    """A hint for whoever gave this address, its certificate or the token."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _MISMATCH:
            return "use the address that its certificate names, or have it name this one (subjectAltName)"
        return "--ca-file takes its certificate, from whoever runs the relay"
    if isinstance(error, ssl.SSLError):
        return "does it speak http:// and not https://?"
    if isinstance(error, RelayRefused):
        if error.status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            return "is it the token that this relay's operator gave you?"
        return "is it a relay of UVCC, of this release?"
    if isinstance(error, http.client.RemoteDisconnected | ConnectionResetError) and url.startswith("http:"):
        return "does it speak https://?"
    if isinstance(error, OSError):
        return "does it run there, and is its port open from here?"
    return "is it a relay of UVCC, of this release?"
