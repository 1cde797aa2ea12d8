"""Opens the plane of one worker: picks the link, pins the peers, starts the sessions."""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx

from uvcc_engine.contract.errors import ConfigError, UnreachableError
from uvcc_engine.contract.job.link_spec import KINDS, LinkSpec
from uvcc_engine.contract.machine import host_names
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.plane import durable
from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.api import Recorder
from uvcc_engine.plane.endpoint import Endpoint
from uvcc_engine.plane.links.addresses import parse_address
from uvcc_engine.plane.links.auto import AUTO_POLICY, AutoLink, RelayPath
from uvcc_engine.plane.links.direct import DirectLink
from uvcc_engine.plane.links.faults import FaultPlan, FaultyLink
from uvcc_engine.plane.links.knocking import KnockAuthenticator
from uvcc_engine.plane.links.link import Link
from uvcc_engine.plane.links.nats_link import NatsLink
from uvcc_engine.plane.links.relay_client import RELAY_POLICY, RelayLink, RelayStanding
from uvcc_engine.plane.links.relay_locator import RelayLocator, RelocatingLink
from uvcc_engine.plane.links.stream_link import StreamLink, stream_address
from uvcc_engine.plane.live import LivePlane
from uvcc_engine.plane.secure_session import SigningIdentity
from uvcc_engine.plane.timing import LinkTiming
from uvcc_engine.plane.waits import Waits
from uvcc_engine.transcript.signing.identity import PublicIdentity

_MAX_HEALTH: Final = 1 << 16
FAULTS_VARIABLE: Final = "UVCC_PLANE_FAULTS"  # a FaultPlan as JSON: rehearses a bad network in a whole run
_WAITS: Final = {
    "peer_timeout_s": "peer_s",
    "first_contact_s": "first_s",
    "refused_s": "refused_s",
    "close_s": "close_s",
    "order_s": "order_s",
    "proof_s": "proof_s",
    "report_s": "report_s",
    "relay_s": "away_s",
    "look_s": "look_s",
    "idle_s": "idle_s",
}


def open_plane(
    *,
    party: int,
    coord: str,
    sid_sub: bytes,
    identity: SigningIdentity,
    peers: Mapping[int, PublicIdentity],
    link: LinkSpec,
    recorder: Recorder | None,
    state_dir: Path,
    on_event: Callable[[str, dict[str, Any]], None],
    moves: Path | None = None,
) -> LivePlane:
    """Connect ``party`` with ``peers`` in the subsession ``sid_sub``. Returns at once; receivers wait.

    ``moves``: the file that says where the relay is, once it has moved.
    Raises ConfigError on an unusable link, UnreachableError if it cannot listen.
    """
    given = {field: getattr(link, name) for name, field in _WAITS.items()}
    waits = replace(Waits(), **{field: wait for field, wait in given.items() if wait is not None})
    others = {p: public for p, public in peers.items() if p != party}
    door = KnockAuthenticator(party, sid_sub, lambda peer: identity.pair_secret(others[peer], sid_sub, "plane-knock"))
    carrier = open_link(party, sid_sub, link, tuple(others), moves, door)
    if (plan := _faults(link)) is not None:
        carrier = FaultyLink(carrier, plan, party)
    now = time.monotonic()
    path = state_dir / f"plane_{coord}.state"
    effect, states = _restore(path, sid_sub, others, link.durable)
    endpoints = {
        p: Endpoint(party, p, sid_sub, identity, public, now, carrier.policy, state=states.get(p))
        for p, public in others.items()
    }
    save = (lambda effect: durable.save(path, sid_sub, effect, states)) if states else None
    return LivePlane(party, endpoints, carrier, recorder, on_event, waits, save=save, restored=effect)


def _faults(link: LinkSpec) -> FaultPlan | None:
    """What the link, or else the environment, wants done to its frames."""
    wanted: object = link.faults
    if wanted is None and (text := os.environ.get(FAULTS_VARIABLE)):
        try:
            wanted = json_of(text)
        except ValueError as error:
            raise ConfigError(f"{FAULTS_VARIABLE} is not JSON: {error}", 'write it like {"drop": 0.01}') from error
    return None if wanted is None else FaultPlan.from_json(wanted)


def _restore(
    path: Path, sid_sub: bytes, peers: Iterable[int], wanted: bool
) -> tuple[bytes | None, dict[int, durable.PeerState]]:
    if not wanted:
        return None, {}
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = durable.load(path, sid_sub)
    return found if found is not None else (None, {p: durable.PeerState() for p in peers})


def open_link(
    party: int,
    sid_sub: bytes,
    link: LinkSpec,
    peers: Sequence[int],
    moves: Path | None = None,
    door: KnockAuthenticator | None = None,
) -> Link:
    """The bare link of a party. ``door``: who may connect to it directly. Raises ConfigError, UnreachableError."""
    kind, box = link.kind, fr.sid64(sid_sub)
    if kind == "direct":
        return _direct(party, link, door)
    if kind == "relay":
        return _moving(_relay, link, box, peers, moves, RelayStanding())
    if kind == "stream":
        return _moving(_stream, link, box, peers, moves, RelayStanding())
    if kind == "nats":
        token_file = Path(link.token_file) if link.token_file else None
        url = _given(link, "nats_url")
        return NatsLink(url=url, party=party, group=link.group, box=box, token_file=token_file, ca_file=_ca_file(link))
    if kind == "auto":
        return _auto(party, link, box, peers, moves, door)
    raise ConfigError("a link without a kind", f"use one of {', '.join(KINDS)}")


def _given(link: LinkSpec, name: str) -> str:
    """What a link of this kind cannot do without. Raises ConfigError."""
    value = str(getattr(link, name))
    if not value:
        raise ConfigError(f"a link of kind {link.kind!r} without {name!r}", "say where it leads and how to log in")
    return value


def _direct(party: int, link: LinkSpec, door: KnockAuthenticator | None) -> DirectLink:
    addresses = {int(p): a for p, a in link.peers.items()}
    for address in addresses.values():
        parse_address(address)
    policy, spins = _policy(link, LinkTiming()), link.spins is not False
    return DirectLink(party, link.listen, addresses, policy=policy, spins=spins, door=door)


def _relay(link: LinkSpec, box: int, standing: RelayStanding) -> RelayLink:
    url, token_file = _given(link, "relay_url"), Path(_given(link, "token_file"))
    policy, ca_file = _policy(link, RELAY_POLICY), _ca_file(link)
    return RelayLink(url=url, token_file=token_file, ca_file=ca_file, box=box, policy=policy, standing=standing)


def _moving(
    make: Callable[[LinkSpec, int, RelayStanding], RelayPath],
    link: LinkSpec,
    box: int,
    peers: Sequence[int],
    moves: Path | None,
    standing: RelayStanding,
) -> RelayPath:
    """A link through a relay that may move; it may have done so before this worker started."""
    if moves is None:
        return make(link, box, standing)
    at = RelayLocator(link, moves)
    at.moved()
    return RelocatingLink(lambda there: make(there, box, standing), make(at.link, box, standing), at, peers)


def _stream(link: LinkSpec, box: int, standing: RelayStanding) -> StreamLink:
    url, ca_file = _given(link, "relay_url"), _ca_file(link)
    tls = ssl.create_default_context(cafile=ca_file) if url.startswith("https") else None
    announced = link.stream or health(url, ca_file)["stream"]
    address, token_file = stream_address(url, announced), Path(_given(link, "token_file"))
    policy = _policy(link, RELAY_POLICY)
    return StreamLink(address=address, token_file=token_file, tls=tls, box=box, policy=policy, standing=standing)


def _auto(
    party: int,
    link: LinkSpec,
    box: int,
    peers: Sequence[int],
    moves: Path | None,
    door: KnockAuthenticator | None,
) -> Link:
    """Direct where possible, else the relay's stream front if it has one, else its HTTP front."""
    direct = _direct(party, link, door) if link.listen or link.peers else None
    if not link.relay_url:
        if direct is None:
            raise ConfigError("link auto has neither addresses nor a relay", "give listen and peers, or relay_url")
        return direct
    standing = RelayStanding()
    relays = [_moving(_relay, link, box, peers, moves, standing)]
    try:
        announced = link.stream or health(link.relay_url, _ca_file(link), 3.0)["stream"]
    except UnreachableError:
        announced = ""  # not up yet; the HTTP front will do when it is
    if announced:
        relays.insert(0, _moving(_stream, replace(link, stream=announced), box, peers, moves, standing))
    return AutoLink(direct or DirectLink(party, "", {}), relays, peers, policy=_policy(link, AUTO_POLICY))


def _policy(link: LinkSpec, base: LinkTiming) -> LinkTiming:
    """``rto_s``: seconds before an unacknowledged frame is sent again for the first time."""
    if (rto := link.rto_s) is None:
        return base
    return replace(base, timing=replace(base.timing, rto_s=rto, rto_cap_s=max(rto, base.timing.rto_cap_s)))


def _ca_file(link: LinkSpec) -> Path | None:
    return Path(link.ca_file) if link.ca_file else None


def health(url: str, ca_file: Path | None, timeout: float = 10.0) -> dict[str, Any]:
    """What a relay says of itself; each wait takes at most ``timeout`` seconds. Raises UnreachableError."""
    verify = ssl.create_default_context(cafile=ca_file) if ca_file else True
    text, end = b"", time.monotonic() + 2 * timeout
    try:
        with (
            httpx.Client(timeout=timeout, verify=verify, trust_env=False) as client,
            client.stream("GET", f"{url.rstrip('/')}/healthz", headers={"accept-encoding": "identity"}) as reply,
        ):
            for piece in reply.raise_for_status().iter_raw():
                text += piece
                if len(text) > _MAX_HEALTH or time.monotonic() > end:
                    raise ValueError("its answer does not end")
        found = json.loads(text)
    except (httpx.HTTPError, ValueError, RecursionError) as error:
        said = host_names.why(error, url)
        raise UnreachableError(f"the relay {url} cannot be reached: {said}", "is it running?") from error
    if not isinstance(found, dict) or found.get("ok") is not True or not isinstance(found.get("stream", ""), str):
        raise UnreachableError(f"the relay {url} is not ready: {str(found)[:200]}", "is it stopping?")
    return {"stream": ""} | found
