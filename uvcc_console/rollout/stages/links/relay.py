"""How the workers of different parties reach each other: the embedded relay, each other directly, or a broker."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import os
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from uvcc_console.core import events as ev
from uvcc_console.core.log import logger
from uvcc_console.fleet import agent_lines
from uvcc_console.halt import relay_path
from uvcc_console.plan.plan import Phase, pod_name
from uvcc_console.rollout.context import Member, Rollout, all_of, each
from uvcc_console.rollout.stages.links.broker import nats_links
from uvcc_console.rollout.stages.links.ports import LINKS, fields_of, free_ports, host_of, listening, python_of
from uvcc_console.runs import domain
from uvcc_engine.contract.agent_protocol.agent_commands import RelayCommand
from uvcc_engine.contract.errors import UnreachableError, UvccError
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.topology import PARTIES, Coord

log = logger(__name__)

TOKEN_FILE = "relay.token"
CA_FILE = "relay.ca.pem"
CLIENTS_FILE = "-clients.json"
SERVE = "serve"
DIAL_S = 5.0
LISTEN_S = 15.0
_SILENT = "its pod said nothing of it"
CERT_DAYS = 30

# accepts and closes connections for a while, however many a stranger makes beside those who are expected
_LISTEN = """
import socket, sys, time
s = socket.create_server((sys.argv[1], 0), backlog=1024)
print(s.getsockname()[1], flush=True)
end = time.monotonic() + float(sys.argv[2])
while (left := end - time.monotonic()) > 0:
    s.settimeout(left)
    try:
        s.accept()[0].close()
    except OSError:
        continue
"""
# dials every address, all at once; prints for each the seconds it took, or what went wrong
_DIAL = """
import json, socket, sys, threading, time
found = {}
def dial(at):
    host, _, port = at.rpartition(":")
    began = time.perf_counter()
    try:
        socket.create_connection((host, int(port)), float(sys.argv[1])).close()
        found[at] = time.perf_counter() - began
    except OSError as e:
        found[at] = str(e)
threads = [threading.Thread(target=dial, args=(at,)) for at in sys.argv[2:]]
[t.start() for t in threads]
[t.join() for t in threads]
print(json.dumps(found))
"""


async def links_for(ctx: Rollout, phase: Phase) -> dict[str, LinkSpec]:
    """The ``link`` of every worker of a phase, by coordinate. Raises UvccError if no kind of link can be had."""
    if ctx.federated is not None:
        return ctx.federated.links(phase)
    asked_there = phase.job.get("task") == SERVE  # of the rehearsal before the run, too
    wanted = "relay" if ctx.plan.profile.link == "auto" and asked_there else ctx.plan.profile.link
    if wanted == "nats":
        for replica in range(phase.topology.replicas):
            ctx.say(relay_started(phase, wanted, ctx.plan.profile.nats.url, replica=replica))
        return await nats_links(ctx, phase)
    if wanted == "auto":
        wanted = "direct" if await reachable(ctx, phase) else "relay"
        ctx.say(_chosen(wanted))
    if wanted == "direct":
        return await _direct(ctx, phase)
    replicas = range(phase.topology.replicas)
    made = await all_of(relay_link(ctx, phase, replica=r, stream=wanted == "stream") for r in replicas)
    return {str(c): made[c.replica] for c in phase.coords()}


def _chosen(kind: str) -> ev.Event:
    why = "the parties reach each other" if kind == "direct" else "the parties cannot all reach each other"
    text = f"auto chose {kind}: {why}"
    return ev.Alert(level="info", name="link", text=text)


# -- direct ----------------------------------------------------------------------------------------------------------


async def _direct(ctx: Rollout, phase: Phase) -> dict[str, LinkSpec]:
    counts = {name: len(phase.coords(name)) for name in phase.pods()}
    free = await free_ports(counts, ctx.members, LINKS)
    at = {c: free[name].pop() for name in phase.pods() for c in phase.coords(name)}
    address = {c: f"{host_of(ctx.members[phase.pod_of(c)])}:{port}" for c, port in at.items()}
    found = {}
    for c, port in at.items():
        peers = {str(p): address[Coord(c.replica, p, c.stage, c.tensor)] for p in range(PARTIES) if p != c.party}
        listen = f"{listening(ctx.members[phase.pod_of(c)])}:{port}"
        found[str(c)] = LinkSpec(kind="direct", listen=listen, peers=peers)
    return found


async def reachable(ctx: Rollout, phase: Phase) -> bool:
    """Whether every pod of a phase can open a connection to the pods of the other parties of its replica."""
    members = ctx.of_phase(phase)
    wanted = {
        a.name: [b.name for b in members if b is not a and b.request.replica == a.request.replica] for a in members
    }
    try:
        return all(isinstance(way, float) for way in (await dial_all(ctx, wanted)).values())
    except UvccError as e:
        log.info("the pods do not reach each other: %s", e)
        return False


async def dial_all(ctx: Rollout, wanted: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], float | str]:
    """Open a connection from each pod to each of those that it wants: the seconds it took, or why there is no way.

    A port is opened for the moment on every pod that is wanted, and everybody dials at once. Raises UvccError if a pod
    cannot listen or is lost.
    """
    callers = {name: sum(name in others for others in wanted.values()) for name in ctx.members}
    listeners = []

    async def listen(m: Member) -> str:
        code = shlex.quote(_LISTEN)
        waits = f"{3 * DIAL_S:g}"
        process = await m.ssh.open(f"exec {python_of(m)} -S -c {code} {listening(m)} {waits}")
        listeners.append(process)
        try:
            async with asyncio.timeout(LISTEN_S):
                return f"{host_of(m)}:{int(await process.stdout.readline())}"
        except (TimeoutError, ValueError) as e:
            raise UnreachableError(f"pod {m.name} could not listen: {e}", "is its Python whole?") from e

    async def dial(m: Member) -> dict[str, float | str]:
        targets = " ".join(shlex.quote(at[name]) for name in wanted[m.name])
        command = f"{python_of(m)} -S - {DIAL_S:g} {targets}"
        return fields_of(m, await m.ssh.sh(command, stdin=_DIAL.encode()))

    try:
        at = await each((ctx.members[name] for name, count in callers.items() if count), listen)
        found = await each((ctx.members[name] for name, others in wanted.items() if others), dial)
    finally:
        for process in listeners:
            process.close()
    return {(a, b): found[a].get(at[b], _SILENT) for a, others in wanted.items() for b in others}


# -- relay -----------------------------------------------------------------------------------------------------------


def relay_tokens(ctx: Rollout, phase: Phase, replica: int = 0) -> list[str]:
    """One relay credential per party, replica and engine run, kept in the run's private folder.

    A phase that goes on without a pod is another engine run: the replaced pod's credential opens nothing there, should
    that machine come back to life; who shares a party's number reads and deletes its mail.
    """
    path = ctx.run_dir / "relay" / _tokens_file(phase, replica)
    if not path.exists():
        _private(path, json.dumps([secrets.token_urlsafe(32) for _ in range(PARTIES)]))
    return list(json.loads(path.read_text()))


def _tokens_file(phase: Phase, replica: int) -> str:
    return f"{phase.engine_run.rpartition('.')[2]}{_of(replica)}.json"


def served(phase: Phase) -> bool:
    """Whether clients ask the model of this phase, who reach nothing but the relay."""
    return phase.kind == "private" and phase.job.get("task") == SERVE


def client_tokens(run_dir: Path, phase_name: str, clients: int) -> list[str]:
    """One relay credential for each client of a served model, kept in the run's private folder."""
    path = run_dir / "relay" / f"{phase_name}{CLIENTS_FILE}"
    if not path.exists():
        _private(path, json.dumps([secrets.token_urlsafe(32) for _ in range(clients)]))
    return list(json.loads(path.read_text()))


def _private(path: Any, text: str) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as f:
        f.write(text)


def _of(replica: int) -> str:
    return f"-r{replica}" if replica else ""


async def relay_link(ctx: Rollout, phase: Phase, *, replica: int = 0, stream: bool = False) -> LinkSpec:
    """Start the relay of a phase's replica on its first pod, unless it runs, and say how workers reach it.

    Every replica has its own relay and its own group, so none waits for another's messages. Between machines it speaks
    TLS under a certificate made for this run, which the replica's pods are given.
    """
    tokens, group, run = relay_tokens(ctx, phase, replica), f"{phase.engine_run}{_of(replica)}", phase.engine_run
    host = ctx.members[pod_name(0, replica)]
    bind = listening(host)
    config: dict[str, Any] = {
        "db": "relay.sqlite",
        "listen": f"{bind}:0",
        "credentials": [{"party": p, "group": group, "token": t} for p, t in enumerate(tokens)],
    }
    if served(phase):
        listed = client_tokens(ctx.run_dir, phase.name, len(phase.job["clients"]))
        config["credentials"] += [{"client": n, "group": group, "token": t} for n, t in enumerate(listed)]
    if stream:
        config["stream_listen"] = f"{bind}:0"
    remote = bind == "0.0.0.0"
    if remote:
        config |= await _certified(ctx, phase, host)
    ack = await host.channel.request(RelayCommand(run=run, action="start", config=config), timeout=60.0)
    scheme, port = agent_lines.listening_at(ack, host.name)
    url = f"{scheme}://{host_of(host) if remote else bind}:{port}"  # where we asked it to, wherever it says it is
    _private(
        ctx.run_dir / relay_path.FOLDER / f"{phase.name}{_of(replica)}{relay_path.AT}",
        json.dumps(
            {
                "url": url,
                "group": group,
                "engine_run": run,
                "tokens": _tokens_file(phase, replica),
                "ca": f"cert{_of(replica)}.pem" if remote else "",
            }
        ),
    )
    there = f"runs/{run}"
    kind = "stream" if stream else "relay"
    ctx.say(relay_started(phase, kind, url, pod=host.name, replica=replica))
    return LinkSpec(
        kind=kind,
        relay_url=url,
        token_file=f"{there}/{TOKEN_FILE}",
        ca_file=f"{there}/{CA_FILE}" if remote else "",
        group=group,
        halt_keys=list(domain.order_keys(ctx.run_dir, ctx.plan.profile.fleet.ssh_key).values()),
        halt_readers=domain.readers(ctx.run_dir, ctx.plan.profile.fleet.ssh_key),
        halt_seal=domain.order_seal(ctx.run_dir),
    )


def relay_started(phase: Phase, kind: str, url: str, *, pod: str = "", replica: int = 0) -> ev.Event:
    """Which relay a phase's replica meets at, for the run's log and layout; an address may name no credentials."""
    at = urlsplit(url)
    host = at.hostname or ""
    shown = f"{at.scheme}://{f'[{host}]' if ':' in host else host}" + (f":{at.port}" if at.port else "")
    where = _address_kind(host)
    fields = {
        "phase": phase.name,
        "replica": replica,
        "kind": kind,
        "relay_host": host,
        "address_kind": where,
        "tls": at.scheme in ("https", "tls"),
        "relay_url_local" if where == "loopback" else "relay_url_public": shown,
    }
    return ev.EngineEvent(pod=pod, level="info", event="privacy_relay_started", fields=fields, at=time.time())


def _address_kind(host: str) -> str:
    """loopback | private | public, or name where it is none of an address."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return "loopback" if host == "localhost" else "name"
    return "loopback" if found.is_loopback else "private" if found.is_private else "public"


async def _certified(ctx: Rollout, phase: Phase, host: Member) -> dict[str, str]:
    """Put the relay's certificate where it and its clients read it."""
    replica = host.request.replica
    cert, key = _certificate(ctx, host_of(host), replica)
    folder = f".uvcc/relay/{phase.engine_run}"
    await host.ssh.sh(f"umask 077; mkdir -p {folder}")
    await host.ssh.put(cert, f"{folder}/cert.pem")
    await host.ssh.put(key, f"{folder}/key.pem")

    async def give(member: Member) -> None:
        there = f".uvcc/runs/{phase.engine_run}"
        await member.ssh.sh(f"umask 077; mkdir -p {there}")
        await member.ssh.put(cert, f"{there}/{CA_FILE}")

    await each((m for m in ctx.of_phase(phase) if m.request.replica == replica), give)
    return {"tls_cert": "cert.pem", "tls_key": "key.pem"}


def forget_certificate(ctx: Rollout, host: Member) -> None:
    """The relay's host is another machine now: its certificate named the old one's address."""
    if host.request.party == 0:
        for name in ("cert", "key"):
            (ctx.run_dir / "relay" / f"{name}{_of(host.request.replica)}.pem").unlink(missing_ok=True)


def _certificate(ctx: Rollout, host: str, replica: int) -> tuple[bytes, bytes]:
    """A self-signed certificate for ``host`` and its key (PEM), made once per run and replica."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    folder = ctx.run_dir / "relay"
    cert_path, key_path = folder / f"cert{_of(replica)}.pem", folder / f"key{_of(replica)}.pem"
    if cert_path.exists() and key_path.exists():
        return cert_path.read_bytes(), key_path.read_bytes()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"uvcc relay {ctx.plan.run}"[:64])])
    try:
        alternative: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        alternative = x509.DNSName(host)
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=CERT_DAYS))
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _private(key_path, secret.decode())
    _private(cert_path, cert.public_bytes(pem).decode())
    return cert_path.read_bytes(), key_path.read_bytes()
