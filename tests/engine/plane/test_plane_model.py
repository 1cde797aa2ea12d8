"""The exactly-once core under a hostile network, and proof that the check would notice: bugs planted one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from model import Lossy

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.plane import channel, endpoint, secure_session
from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.durable import PeerState

QUICK = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


def test_delivered_is_always_a_prefix_and_everything_arrives_after_heal() -> None:
    run_state_machine_as_test(Lossy, settings=settings(max_examples=60, stateful_step_count=40, **QUICK))


Patch = Callable[[pytest.MonkeyPatch], None]


def forgotten_dedup(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(channel.RecvChannel, "has", lambda self, seq: False)
    deliver = channel.RecvChannel._deliver
    patch.setattr(channel.RecvChannel, "_deliver", lambda self, digest: deliver(self, b""))


def volatile_cursor(patch: pytest.MonkeyPatch) -> None:
    build = Lossy.endpoint
    patch.setattr(Lossy, "endpoint", lambda self, party, state: build(self, party, PeerState()))


def no_integrity_check(patch: pytest.MonkeyPatch) -> None:
    def open_unchecked(self: Any, header: fr.Header, nonce: bytes, sealed: Any) -> bytes:
        counter = nonce + (2).to_bytes(4, "big")  # GCM's first data block, without its tag
        key = self._recv_secret(header)
        return Cipher(algorithms.AES(key), modes.CTR(counter)).decryptor().update(bytes(sealed)[:-16])

    keys = secure_session.Keys.__init__

    def remember(self: Any, secret: bytes) -> None:
        keys(self, secret)
        SECRETS[id(self)] = secret

    SECRETS: dict[int, bytes] = {}

    def recv_secret(self: Any, header: fr.Header) -> bytes:
        secret = SECRETS[id(self._recv)]
        for _ in range(header.generation % 64):
            secret = secure_session.expand_key(secret, b"next")
        self._confirm(header)
        return secure_session.expand_key(secret, b"key")

    patch.setattr(secure_session.Keys, "__init__", remember)
    patch.setattr(secure_session.SecureSession, "_recv_secret", recv_secret, raising=False)
    patch.setattr(secure_session.SecureSession, "open", open_unchecked)
    patch.setattr(fr, "check_crc", lambda header, body: None)


def ack_before_commit(patch: pytest.MonkeyPatch) -> None:
    acknowledge = endpoint.Endpoint._acknowledge

    def eager(self: Any, *args: Any) -> Any:
        self.state.taken = self.inbox.taken()  # says "safe" for what is only in memory
        return acknowledge(self, *args)

    patch.setattr(endpoint.Endpoint, "_acknowledge", eager)


def reused_id(patch: pytest.MonkeyPatch) -> None:
    new_frame = channel.SendChannel.new_frame

    def reuse(self: Any, now: float, *, bulk: bool = False) -> Any:
        if self.next_seq == 3:
            self.next_seq = 2
        return new_frame(self, now, bulk=bulk)

    patch.setattr(channel.SendChannel, "new_frame", reuse)


def lost_credit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(channel.RecvChannel, "take", lambda self, credit: None)


def no_retransmission(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(channel.SendChannel, "_sent", lambda self, frame, now: setattr(frame, "due", float("inf")))
    patch.setattr(channel.SendChannel, "_fast_retransmit", lambda self, top, now: None)


def acknowledges_a_gap(patch: pytest.MonkeyPatch) -> None:
    acknowledgement = channel.RecvChannel.acknowledgement

    def generous(self: Any) -> channel.Acknowledgement:
        ack = acknowledgement(self)
        return ack._replace(expected=ack.ranges[-1][1], ranges=()) if ack.ranges else ack

    patch.setattr(channel.RecvChannel, "acknowledgement", generous)


BUGS: list[Patch] = [forgotten_dedup, reused_id, lost_credit]
LATE: list[Patch] = [volatile_cursor, ack_before_commit, no_integrity_check, no_retransmission, acknowledges_a_gap]
"""Bugs that hundreds of stories pass by."""


@pytest.mark.parametrize(
    "plant",
    [*BUGS, *(pytest.param(bug, marks=pytest.mark.ci(__file__)) for bug in LATE)],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_bug_is_found(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    quick = settings(max_examples=3000, stateful_step_count=40, phases=[Phase.generate], **QUICK)
    with pytest.raises((AssertionError, ProtocolError)):  # the property fails, or an honest party is accused
        run_state_machine_as_test(Lossy, settings=quick)
