"""What a JSON request may ask: one frozen record per address, its fields read totally, refused by name.

:func:`parse` answers for every body there is. Who asks is no matter of a body: what it claims of itself (``group``,
``sender``) is held against its credential by whoever serves it. Standard library only.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from uvcc_engine.contract.run_files.records import Malformed
from uvcc_engine.relay.binary import MAX_ID
from uvcc_engine.relay.relay_records import MAX_BODY, MAX_NAME

MAX_BYTES: Final = 24 << 20  # of a request
MAX_WAIT_S: Final = 60.0
MAX_TTL_S: Final = 1 << 31
MAX_ENTRIES: Final = 65_536
_U64: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonRequest:
    """``group``: the one that a request claims to be of, None where it says nothing."""

    group: str | None

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Self:
        """The request that an object holds. Raises ValueError."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class EnqueuedMessage:
    """A message for ``receiver``, kept for ``ttl_s`` seconds (0: as the relay keeps them); ``sender`` as claimed."""

    sender: int | None
    receiver: int
    msg_id: bytes
    payload: bytes
    ttl_s: int

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> EnqueuedMessage:
        """Raises ValueError."""
        msg_id = text(data, "msg_id", None, MAX_ID).encode()
        if not msg_id:
            raise ValueError(f"msg_id must have 1 to {MAX_ID} bytes")
        return cls(
            claimed(data, "sender"),
            whole(data, "receiver", None, 0, 255),
            msg_id,
            base64.b64decode(text(data, "payload_b64", None, MAX_BYTES), validate=True),
            whole(data, "ttl_s", 0, 0, MAX_TTL_S),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnqueueRequest(JsonRequest):
    """``{messages: [...]}``, or one message itself (``alone``), into ``box``."""

    box: int
    messages: tuple[EnqueuedMessage, ...]
    alone: bool

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Self:
        listed = entries(data.get("messages", [data]), "messages")
        return cls(
            group=group_of(data),
            box=whole(data, "box", 0),
            messages=tuple(EnqueuedMessage.read(entry) for entry in listed),
            alone="messages" not in data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PollRequest(JsonRequest):
    """Up to ``max_bytes`` of what waits in ``box``, after ``wait_s`` seconds at most; the wait is relative."""

    receiver: int | None
    box: int
    max_bytes: int
    wait_s: float

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Self:
        return cls(
            group=group_of(data),
            receiver=claimed(data, "receiver"),
            box=whole(data, "box", 0),
            max_bytes=whole(data, "max_bytes", 8 << 20),
            wait_s=seconds(data, "wait_s", 2.0, MAX_WAIT_S),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AckRequest(JsonRequest):
    """These deliveries were taken."""

    box: int
    deliveries: tuple[int, ...]

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Self:
        found = numbers(data.get("deliveries"), "deliveries")
        return cls(group=group_of(data), box=whole(data, "box", 0), deliveries=tuple(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsRequest(JsonRequest):
    """Leave the record ``put`` (its name and body), then take what is newer than ``after`` and begins with ``want``."""

    after: int
    want: str
    wait_s: float
    put: tuple[str, str] | None

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Self:
        put = None
        if data.get("put") is not None:
            (given,) = entries([data["put"]], "put")
            put = text(given, "name", None, MAX_NAME), text(given, "body", None, MAX_BODY)
        return cls(
            group=group_of(data),
            after=whole(data, "after", -1, -1),
            want=text(data, "want", "", MAX_NAME),
            wait_s=seconds(data, "wait_s", 0.0, MAX_WAIT_S),
            put=put,
        )


R = TypeVar("R", bound=JsonRequest)


def parse(kind: type[R], body: bytes) -> R | Malformed:
    """What a body asks for, or what is wrong with it. Total."""
    try:
        return kind.read(document(body))
    except ValueError as error:  # of base64 as well
        return Malformed(str(error))


def group_of(data: Mapping[str, Any]) -> str | None:
    """The group that a request claims. Raises ValueError."""
    return None if "group_id" not in data else text(data, "group_id", None, MAX_NAME)


def claimed(data: Mapping[str, Any], name: str) -> int | None:
    """The number that a request claims. Raises ValueError."""
    return None if name not in data else whole(data, name, None, 0, 255)


def document(body: bytes) -> dict[str, Any]:
    """The object of a request. Raises ValueError for anything else, also for one that is nested too deeply."""
    try:
        found = json.loads(body, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def whole(data: Mapping[str, Any], name: str, default: int | None, low: int = 0, high: int = _U64) -> int:
    """An integer field in bounds. Raises ValueError."""
    value = data.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} is not a whole number from {low} to {high}")
    return value


def seconds(data: Mapping[str, Any], name: str, default: float, high: float) -> float:
    """A time; longer ones are cut to ``high``. Raises ValueError."""
    value = data.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is not a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is not a number")
    return float(max(0.0, min(value, high)))


def text(data: Mapping[str, Any], name: str, default: str | None, limit: int) -> str:
    """A string of ``limit`` UTF-8 bytes at most. Raises ValueError."""
    value = data.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"{name} is not a string")
    try:
        if len(value) > limit or len(value.encode()) > limit:
            raise ValueError(f"{name} has more than {limit} bytes")
    except UnicodeEncodeError:
        raise ValueError(f"{name} is not text") from None
    return value


def entries(value: Any, name: str) -> list[dict[str, Any]]:
    """A bounded list of objects. Raises ValueError."""
    if not isinstance(value, list) or len(value) > MAX_ENTRIES or not all(isinstance(e, dict) for e in value):
        raise ValueError(f"{name} is not a list of at most {MAX_ENTRIES} objects")
    return value


def numbers(value: Any, name: str) -> list[int]:
    """A bounded list of ids. Raises ValueError."""
    good = isinstance(value, list) and len(value) <= MAX_ENTRIES
    if not good or not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= _U64 for n in value):
        raise ValueError(f"{name} is not a list of at most {MAX_ENTRIES} ids")
    return list(value)
