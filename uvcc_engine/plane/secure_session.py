"""Secure session between two parties of a subsession: who they are, which keys they use, and nothing said in clear.

The lower party starts: HELLO (fresh X25519 key) -> HELLO (fresh key, hash of the first) + AUTH -> AUTH. Both keys and
both pinned identities enter the transcript hash; session keys are HKDF-SHA256 (RFC 5869) of the ephemeral agreement
(forward secrecy) and of the static one (only the two identities can compute it); each AUTH carries an Ed25519 signature
of the transcript hash, sealed under a key of this handshake, as in SIGMA (Krawczyk 2003). AES-256-GCM with stream and
sequence number of the channel as nonce seals every later frame. The higher party may ask for a start by a HELLO without
a key.

A HELLO ends with a MAC under a key of the two static identities and the subsession, checked before anything is computed
from it: only the peer can cause a key agreement or a signature. An old one can come again, so none is answered twice,
few are answered in a short time, and a HELLO never ends a running session: only a verified AUTH replaces it.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.api import Buffer
from uvcc_engine.plane.event_limiter import TokenBucket
from uvcc_engine.transcript.signing.identity import PublicIdentity, verify_signature

NAMESPACE: Final = "uvcc-plane"
_HELLO = struct.Struct(
    "<8sBBH16s32s32s"
)  # magic, party, peer, kind, instance, ephemeral key, hash of the answered HELLO
_MAGIC: Final = b"UVCCHEL2"
_MAC_BYTES: Final = 32
_ASK: Final = 0
_START: Final = 1
_ANSWER: Final = 2
_GENERATIONS_KEPT: Final = 2
_ANSWERED_KEPT: Final = 1024  # HELLOs of the peer that are not answered again
_AGREEMENTS: Final = (16.0, 1.0)  # at once, and per second: each costs two agreements and a signature


class SigningIdentity(Protocol):
    """What a session needs of ``transcript.identity.Identity``."""

    public: PublicIdentity

    def sign(self, namespace: str, payload: bytes) -> str: ...

    def pair_secret(self, peer: PublicIdentity, sid_job: bytes, label: str) -> bytes: ...


class Keys:
    """The keys of one direction, one per generation, each derived from the one before; old ones are forgotten."""

    __slots__ = ("_aead", "_secret", "newest")

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.newest = 0
        self._aead: dict[int, AESGCM] = {0: AESGCM(expand_key(secret, b"key"))}

    def step(self) -> int:
        """Make the next generation; returns its number. Keeps the previous one for what is still under way."""
        self._secret = expand_key(self._secret, b"next")
        self.newest += 1
        self._aead[self.newest] = AESGCM(expand_key(self._secret, b"key"))
        self._aead.pop(self.newest - _GENERATIONS_KEPT, None)
        return self.newest

    def sealing(self, generation: int) -> AESGCM:
        return self._aead[generation]

    def opening(self, generation: int) -> AESGCM | None:
        """The key of a generation; None if it is forgotten or more than one ahead. Does not advance."""
        if generation == self.newest + 1:
            return AESGCM(expand_key(expand_key(self._secret, b"next"), b"key"))
        return self._aead.get(generation)


class SecureSession:
    """An established session: seals what goes to ``peer`` and opens what comes from it."""

    def __init__(self, session_id: int, sending: bytes, receiving: bytes, instance: bytes) -> None:
        self.id = session_id
        self.instance = instance  # names the peer's process
        self._send = Keys(sending)
        self._recv = Keys(receiving)
        self.sealed_frames = 0

    @property
    def generation(self) -> int:
        return self._send.newest

    def rekey(self) -> None:
        """Seal new frames under the next generation. The caller makes sure that no older one than the last is kept."""
        self._send.step()
        self.sealed_frames = 0

    def seal(self, generation: int, nonce: bytes, plain: Buffer, aad: bytes) -> bytes:
        return self._send.sealing(generation).encrypt(nonce, plain, aad)

    def seal_into(self, generation: int, nonce: bytes, plain: Buffer, aad: bytes, out: memoryview) -> None:
        self._send.sealing(generation).encrypt_into(nonce, plain, aad, out)

    def open(self, header: fr.Header, nonce: bytes, sealed: Buffer) -> bytes:
        """The plain bytes. Raises UnprovenError if they were not sealed by the peer in this session."""
        try:
            plain = self._key(header).decrypt(nonce, sealed, header.aad)
        except InvalidTag:
            raise _broken(header) from None
        self._confirm(header)
        return plain

    def open_into(self, header: fr.Header, nonce: bytes, sealed: Buffer, out: memoryview) -> None:
        """As :meth:`open`, into ``out``, whose content is undefined if this raises."""
        try:
            self._key(header).decrypt_into(nonce, sealed, header.aad, out)
        except InvalidTag:
            raise _broken(header) from None
        self._confirm(header)

    def _key(self, header: fr.Header) -> AESGCM:
        key = self._recv.opening(header.generation)
        if key is None:
            raise _broken(header)
        return key

    def _confirm(self, header: fr.Header) -> None:
        if header.generation > self._recv.newest:  # proven by the seal: the peer really has moved on
            self._recv.step()


def _broken(header: fr.Header) -> fr.UnprovenError:
    return fr.UnprovenError(f"a frame of class {header.cls:#x} has a broken seal", party=header.src)


def expand_key(secret: bytes, info: bytes, length: int = 32) -> bytes:
    """``length`` bytes of HKDF-Expand (SHA-256) under this plane's label and ``info``."""
    return HKDFExpand(algorithm=hashes.SHA256(), length=length, info=b"UVCC_PLANE_V1 " + info).derive(secret)


class Greeting(NamedTuple):
    """An established session and what the peer said, under its signature, about its channels."""

    session: SecureSession
    restarted: bool  # another process of the peer than before
    cursors: bytes


class _Hello(NamedTuple):
    kind: int
    instance: bytes
    key: bytes
    answers: bytes
    raw: bytes


class _Pending(NamedTuple):
    """A handshake whose other side has not proven itself yet; ``frames`` move it forward."""

    hello: _Hello
    transcript: bytes
    session: SecureSession
    auth_key: bytes
    frames: list[bytes]


class Handshake:
    """Brings up sessions with one peer. Feed it frames; it hands out frames to send and finished sessions.

    ``cursors`` is called when an AUTH is made and travels in it, sealed and signed.
    """

    def __init__(
        self,
        me: int,
        peer: int,
        sid_sub: bytes,
        identity: SigningIdentity,
        peer_identity: PublicIdentity,
        cursors: Callable[[], bytes],
        entropy: Callable[[int], bytes],
    ) -> None:
        self._me, self._peer = me, peer
        self._sid_sub = sid_sub
        self._sid = fr.sid64(sid_sub)
        self._identity, self._peer_identity = identity, peer_identity
        self._instance = entropy(16)
        self._cursors = cursors
        self._entropy = entropy
        self._ephemeral: X25519PrivateKey | None = None  # of a START or ANSWER that is still open
        self._hello = b""
        self._mac_key = b""
        self._answered: dict[bytes, None] = {}
        self._retired: dict[bytes, None] = {}  # processes of the peer that another one has followed
        self._agreements = TokenBucket(*_AGREEMENTS)
        self._pending: _Pending | None = None
        self._done: tuple[bytes, list[bytes]] = (b"", [])  # HELLO that led to the running session, our last frames
        self.established: SecureSession | None = None

    def outgoing(self) -> list[bytes]:
        """Frames that move the handshake forward; send them again from time to time until it is established."""
        if self._pending is not None:
            return self._pending.frames
        if self._me < self._peer:
            if self._ephemeral is None:
                self._open(_START, bytes(32))
        elif not self._hello:
            self._hello = self._pack(_ASK, bytes(32), bytes(32))
        return [self._frame(fr.HELLO, 0, self._hello)]

    def on_hello(self, body: Buffer, now: float) -> list[bytes]:
        """Take a HELLO; returns frames to send at once. Raises UnprovenError if it is not the peer's or out of turn."""
        hello = self._read(bytes(body))
        if hello.raw == self._done[0]:
            return self._done[1]  # our last frame was lost
        if hello.kind == _ANSWER and self._ephemeral is not None and hello.answers == _hash(self._hello):
            if self._pending is None or self._pending.hello.raw != hello.raw:
                self._spend(now)
                self._agree(hello, self._ephemeral)
            return []  # nothing is proven yet; their AUTH follows
        if hello.kind == _ANSWER:
            return self.outgoing()  # it waits in a handshake that was never ours, or an old one came again: start anew
        if hello.kind == _ASK:
            served = self.established is not None and hello.instance == self.established.instance
            return [] if served or hello.instance in self._retired else self.outgoing()
        if self._pending is None or self._pending.hello.raw != hello.raw:
            self._answer(hello, now)
        return self.outgoing()

    def _answer(self, hello: _Hello, now: float) -> None:
        digest = _hash(hello.raw)
        if digest in self._answered or hello.instance in self._retired:
            raise fr.UnprovenError("an old HELLO came again", party=self._peer)
        self._spend(now)
        self._agree(hello, self._open(_ANSWER, digest))
        _keep(self._answered, digest)

    def _spend(self, now: float) -> None:
        if not self._agreements.take(now):
            raise fr.UnprovenError("more HELLOs in a short time than are answered", party=self._peer)

    def on_auth(self, header: fr.Header, body: Buffer) -> tuple[Greeting | None, list[bytes]]:
        """Take an AUTH; returns the session that it completes, if any, and frames to send at once.

        Raises UnprovenError if it is not the pinned peer's proof for the pending handshake.
        """
        pending = self._pending
        if self.established is not None and header.session == self.established.id:
            return None, []  # repeated because it was not sure to have arrived
        if pending is None or header.session != pending.session.id:
            raise fr.UnprovenError("AUTH of a handshake that is not this one, or by another identity", party=self._peer)
        try:
            plain = AESGCM(pending.auth_key).decrypt(bytes(12), body, header.aad)
        except InvalidTag:
            raise fr.UnprovenError("AUTH has a broken seal", party=self._peer) from None
        size = int.from_bytes(plain[:2], "little")
        signature, cursors = plain[2 : 2 + size].decode("ascii", "replace"), plain[2 + size :]
        if not verify_signature(
            self._peer_identity, NAMESPACE, _signed(pending.transcript, self._peer, cursors), signature
        ):
            raise fr.UnprovenError("AUTH is not signed by the pinned identity", party=self._peer)
        before, self.established = self.established, pending.session
        self._done = (pending.hello.raw, pending.frames[1:] if self._me < self._peer else pending.frames)
        self._pending = self._ephemeral = None  # forward secrecy: the ephemeral key is gone
        restarted = before is not None and before.instance != pending.session.instance
        if before is not None and restarted:
            _keep(self._retired, before.instance)
        return Greeting(pending.session, restarted, cursors), self._done[1] if self._me < self._peer else []

    def _open(self, kind: int, answers: bytes) -> X25519PrivateKey:
        self._ephemeral = X25519PrivateKey.from_private_bytes(self._entropy(32))
        self._hello = self._pack(kind, self._ephemeral.public_key().public_bytes_raw(), answers)
        return self._ephemeral

    def _pack(self, kind: int, key: bytes, answers: bytes) -> bytes:
        hello = _HELLO.pack(_MAGIC, self._me, self._peer, kind, self._instance, key, answers)
        return hello + self._mac(hello)

    def _mac(self, hello: bytes) -> bytes:
        if not self._mac_key:
            self._mac_key = self._identity.pair_secret(self._peer_identity, self._sid_sub, "plane-hello")
        return hmac.digest(self._mac_key, hello, hashlib.sha256)

    def _frame(self, cls: int, session: int, body: bytes) -> bytes:
        aad = fr.pack_header(cls, self._me, self._peer, self._sid, session, 0, 0, 0, len(body))
        return fr.finish(aad, body) + body

    def _read(self, body: bytes) -> _Hello:
        if len(body) != _HELLO.size + _MAC_BYTES:
            raise fr.UnprovenError("malformed HELLO", party=self._peer)
        if not hmac.compare_digest(self._mac(body[: _HELLO.size]), body[_HELLO.size :]):
            raise fr.UnprovenError("a HELLO that is not by the pinned identity", party=self._peer)
        magic, party, peer, kind, instance, key, answers = _HELLO.unpack_from(body)
        due = (_ASK, _ANSWER) if self._me < self._peer else (_START,)
        if (magic, party, peer) != (_MAGIC, self._peer, self._me) or kind not in due:
            raise fr.UnprovenError("a HELLO of another protocol, for another party or out of turn", party=self._peer)
        return _Hello(kind, instance, key, answers, body)

    def _agree(self, hello: _Hello, own: X25519PrivateKey) -> None:
        """Compute the keys that only the pinned peer can compute as well, and our proof."""
        low_first = self._me < self._peer
        ours, theirs = (self._hello, self._identity.public), (hello.raw, self._peer_identity)
        low, high = (ours, theirs) if low_first else (theirs, ours)
        transcript = hashlib.sha256(
            b"UVCC_PLANE_HELLO_V1" + self._sid_sub + low[0] + high[0] + _pin(low[1]) + _pin(high[1])
        ).digest()
        try:
            ephemeral = own.exchange(X25519PublicKey.from_public_bytes(hello.key))
        except ValueError:
            raise fr.UnprovenError("an X25519 key of small order in HELLO", party=self._peer) from None
        static = self._identity.pair_secret(self._peer_identity, self._sid_sub, "plane")
        secret = HKDF.extract(hashes.SHA256(), transcript, ephemeral + static)
        mine, other = (b"low", b"high") if low_first else (b"high", b"low")
        session = SecureSession(
            int.from_bytes(expand_key(secret, b"id", 8), "little") or 1,
            expand_key(secret, b"data " + mine),
            expand_key(secret, b"data " + other),
            hello.instance,
        )
        frames = [
            self._frame(fr.HELLO, 0, self._hello),
            self._auth(session.id, transcript, expand_key(secret, b"auth " + mine)),
        ]
        self._pending = _Pending(hello, transcript, session, expand_key(secret, b"auth " + other), frames)

    def _auth(self, session: int, transcript: bytes, key: bytes) -> bytes:
        cursors = self._cursors()
        signature = self._identity.sign(NAMESPACE, _signed(transcript, self._me, cursors)).encode("ascii")
        plain = len(signature).to_bytes(2, "little") + signature + cursors
        aad = fr.pack_header(fr.AUTH, self._me, self._peer, self._sid, session, 0, 0, 0, len(plain) + fr.TAG_BYTES)
        body = AESGCM(key).encrypt(bytes(12), plain, aad)  # this key seals this one frame
        return fr.finish(aad, body) + body


def _keep(known: dict[bytes, None], item: bytes) -> None:
    known[item] = None
    if len(known) > _ANSWERED_KEPT:
        del known[next(iter(known))]


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _pin(identity: PublicIdentity) -> bytes:
    return hashlib.sha256(f"{identity.ed25519}\n{identity.x25519}".encode()).digest()


def _signed(transcript: bytes, party: int, cursors: bytes) -> bytes:
    return b"UVCC_PLANE_AUTH_V1" + transcript + bytes([party]) + hashlib.sha256(cursors).digest()
