"""Why the relay turns somebody away: codes, which are counted and logged; what a request says never becomes one."""

from __future__ import annotations

from enum import StrEnum


class Refusal(StrEnum):
    """Each is what a line of the log says; their number is bounded whatever anybody sends."""

    NO_TOKEN = "no token"
    UNKNOWN_TOKEN = "unknown token"
    SILENT = "showed no token"
    CONNECTIONS = "too many connections of one credential"
    NO_TLS = "no TLS"
    NOT_ACCEPTED = "cannot be accepted"
    LONG_HEAD = "too long a request head"
    NOT_HTTP = "not an HTTP request"
    NOT_STREAM = "not a stream client"
    TOO_LARGE = "too large a request"
    UNFINISHED = "too many bytes of unfinished requests"
    NOT_READ = "does not read"
    SLOW = "too slow a request"
    STALLED = "stopped within a request"
    MALFORMED = "a malformed request"
    NO_MAILBOX = "a token that has no mailbox"
    NO_ROOM = "more than a credential may have"


class RefusedConnectionError(Exception):
    """A connection that ends for ``code``."""

    def __init__(self, code: Refusal) -> None:
        super().__init__(code.value)
        self.code = code
