"""An inventory of real OpenSSH servers that refuse, limit, change and freeze: named, pinned, ended each by itself."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncssh
import pytest
import yaml
from opensshd import Sshd, why_not

from uvcc_console.cli.main import main
from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet import ssh_keys
from uvcc_console.fleet.agent_client import AgentClient
from uvcc_console.fleet.inventory import InventoryProvider, read_hosts
from uvcc_console.fleet.pins import HostKeyPins, fingerprint, plain
from uvcc_console.fleet.provider import PodRequest
from uvcc_console.fleet.ssh import PodLink, Timeouts
from uvcc_console.fleet.ssherrors import HostKeyChanged
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import load
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.stages.fleet import provision
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it runs")
QUICK = Timeouts(connect=60.0, login=60.0, operation=60.0, backoff_first=0.02)
RUN = "demo-1"


class Hosts:
    """Servers, the inventory that lists them, and the folder of the run that claims them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = paths.ensure(paths.run_dir(RUN))
        (self.run_dir / "conductor.json").write_text(json.dumps({"pid": os.getpid(), "starttime": 1}))  # it has died
        self.mine = asyncssh.generate_private_key("ssh-ed25519")
        self.key = folder / "mine"
        self.key.write_bytes(self.mine.export_private_key("openssh"))
        self.key.chmod(0o600)
        self.servers: list[Sshd] = []
        self.entries: list[dict] = []
        self.list = folder / "hosts.yaml"

    def add(self, *more: str, **entry: object) -> Sshd:
        n = len(self.servers)
        server = Sshd(self.folder / f"s{n}", self.mine, *more, home=self.folder / f"h{n}").up()
        self.servers.append(server)
        self.entries.append(server.entry(self.key, party=n, **entry))
        self.list.write_text(yaml.safe_dump({"hosts": self.entries}))
        return server

    def provider(self) -> InventoryProvider:
        """What a process has that was just started."""
        return InventoryProvider(read_hosts(self.list), self.run_dir)

    def rollout(self) -> Rollout:
        """What a conductor has that was just started."""
        _, profile = load("demo", [f"fleet={json.dumps({'provider': 'inventory', 'hosts': str(self.list)})}"])
        plan = make_plan(RUN, "demo", profile)
        journal = Journal(self.run_dir / "journal.sqlite", source="test")
        members = {name: Member(name, request) for name, request in plan.requests.items()}
        bus = Bus(journal)
        if not bus.snapshot.run:
            about = {"replicas": 1, "pipeline_stages": 1, "tensor": 1, "stages": list(plan.stages)}
            made = profile.model_dump(mode="json")
            bus.commit(ev.RunCreated(run=RUN, profile_name="demo", job_kind="private", profile=made, **about))
        return Rollout(plan, self.run_dir, bus, self.provider(), ssh_keys.operator_key(self.run_dir), members)


@pytest.fixture
def hosts(short: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setattr(provision, "BACKOFF_S", 0.01)
    made = Hosts(short)
    yield made
    for server in made.servers:
        server.down()


def want(party: int) -> PodRequest:
    return PodRequest(f"uvcc-{RUN}-p{party}r0", party, 0)


@pytest.mark.parametrize("most", [1, 2])
async def test_few_sessions_are_enough(hosts: Hosts, most: int) -> None:
    server = hosts.add(f"MaxSessions {most}")
    link = PodLink("p0r0", server.address, hosts.mine, timeouts=QUICK)
    bridges = [await link.open("cat") for _ in range(2)]  # stay open, as an agent's channel does
    blobs = [os.urandom(200_000) for _ in range(4)]
    await asyncio.gather(*(link.put(blob, f"blob{n}") for n, blob in enumerate(blobs)))
    said = await asyncio.gather(*(link.run(f"sha256sum blob{n % 4}; sleep 0.02") for n in range(12)))
    assert all(done.exit == 0 for done in said)
    assert await asyncio.gather(*(link.read(f"blob{n}") for n in range(4))) == blobs
    for bridge in bridges:
        assert not bridge.stdout.at_eof()
        bridge.close()
    await link.close()


async def test_a_server_without_sessions_is_named(hosts: Hosts) -> None:
    server = hosts.add("MaxSessions 0")
    link = PodLink("p1r0", server.address, hosts.mine, timeouts=QUICK)
    for refused in (link.run("true"), link.read(".ssh/authorized_keys"), link.open("cat")):
        with pytest.raises(UnreachableError, match=r"p1r0 .*MaxSessions is reached") as caught:
            await refused
        assert "sshd_config" in caught.value.hint
    await link.close()


async def test_a_server_that_drops_who_waits_at_its_door_is_entered_in_the_end(hosts: Hosts) -> None:
    server = hosts.add("MaxStartups 2:50:4")
    links = [PodLink(f"p{n}", server.address, hosts.mine, timeouts=replace(QUICK, connect=150.0)) for n in range(12)]
    assert {done.text for done in await asyncio.gather(*(link.run("echo in") for link in links))} == {"in"}
    for link in links:
        await link.close()


async def test_a_door_that_stays_shut_is_named(hosts: Hosts) -> None:
    async def shut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    door = await asyncio.start_server(shut, "127.0.0.1", 0)
    port = door.sockets[0].getsockname()[1]
    link = PodLink("p0r0", f"u@127.0.0.1:{port}", hosts.mine, timeouts=replace(QUICK, connect=3.0))
    with pytest.raises(UnreachableError, match=r"p0r0 .*MaxStartups"):
        await link.connect()
    door.close()


async def test_a_forced_command_and_a_password_only_server_are_named_as_such(hosts: Hosts) -> None:
    hosts.add("ForceCommand echo no shell here")
    hosts.add("PubkeyAuthentication no", "PasswordAuthentication yes")
    hosts.add('ForceCommand cat /etc/hostname; sh -c "$SSH_ORIGINAL_COMMAND"')
    provider = hosts.provider()
    with pytest.raises(UvccError, match=r"'no shell here'.*runs a forced command") as forced:
        await provider.create(want(0))
    assert "held by" not in str(forced.value)
    assert "authorized_keys" in str(forced.value)
    with pytest.raises(UvccError, match="lets in by password only, not by a key"):
        await provider.create(want(1))
    with pytest.raises(UvccError, match="prints text of its own"):
        await provider.create(want(2))
    assert provider.begun("uvcc-") == set()  # nobody was asked for a claim, so none can be left behind
    assert await provider.list(f"uvcc-{RUN}-") == []
    assert await provider.list("uvcc-") == []
    assert len(provider.silent) == 3
    await provider.close()


async def test_a_pin_of_any_kind_of_key_fits_a_server_that_has_several(hosts: Hosts) -> None:
    server = hosts.add()
    server.down()
    server.new_host_key("ecdsa-sha2-nistp256", "ecdsa")
    server.new_host_key("ssh-rsa", "rsa")
    server.more = [f"HostKey {server.folder}/rsa", f"HostKey {server.folder}/ecdsa"]
    server.up()
    for name in ("host", "rsa", "ecdsa"):
        key = plain(asyncssh.read_private_key(str(server.folder / name)))
        link = PodLink("p0r0", server.address, hosts.mine, host_key=key, timeouts=QUICK)
        await link.connect()
        await link.close()
    link = PodLink("p0r0", server.address, hosts.mine, timeouts=QUICK)
    await link.connect()
    assert link.host_key == server.host_key  # of several, the kind that everybody pins
    await link.close()


async def test_one_pin_binds_every_connection_and_every_process(hosts: Hosts) -> None:
    """The inventory's key or the first contact's: an impostor gets no claim, no bootstrap, no halt and no teardown."""
    named, met = hosts.add(), hosts.add()
    hosts.entries[0]["host_key"] = named.host_key + " somebody@example"
    hosts.list.write_text(yaml.safe_dump({"hosts": hosts.entries}))
    ctx = hosts.rollout()
    for party in (0, 1):
        await provision.one_pod(ctx, ctx.members[f"p{party}r0"])
        await provision.detach(ctx.members[f"p{party}r0"])
    await ctx.provider.close()
    right = [named.host_key, met.host_key]
    assert [ctx.bus.snapshot.pods[f"p{p}r0"].host_key for p in (0, 1)] == right
    for server in (named, met):
        server.down()
        server.new_host_key()
        server.up()
    second = hosts.rollout()
    for party, server in enumerate((named, met)):
        expected, name = fingerprint(right[party]), f"p{party}r0"
        member, view = second.members[name], second.bus.snapshot.pods[name]
        (member.pod,) = [p for p in await second.provider.list(f"uvcc-{RUN}-") if p.party == party]
        assert member.pod.host_key == right[party]
        agent = AgentClient(PodLink(name, view.address, second.key, host_key=view.host_key, timeouts=QUICK))
        tries = {
            "conductor": provision.connect(second, member),
            "sidecar": agent.start(),
            "teardown": second.provider.delete(member.pod),
            "wait": second.provider.wait_ready(member.pod),
        }
        for who, attempt in tries.items():
            with pytest.raises(HostKeyChanged) as caught:
                await attempt
            assert (caught.value.expected, caught.value.seen) == (expected, server.fingerprint), who
            for word in (server.address, expected, server.fingerprint):
                assert word in caught.value.what
        await agent.close()
        await agent.link.close()
        assert "uvcc pod demo-1 replace" in await _refusal(member)
    with pytest.raises(UvccError, match="may be claimed already"):
        await second.provider.create(want(1))
    await second.provider.close()
    # what the hint says of a machine that was met: OpenSSH's own tool forgets it
    command = HostKeyPins.here().forget_command(met.address)
    subprocess.run(shlex.split(command), check=True, capture_output=True)
    third = hosts.provider()
    assert [p.party for p in await third.list(f"uvcc-{RUN}-") if not p.doubt] == [1]
    await third.close()


async def _refusal(member: Member) -> str:
    try:
        await member.ssh.connect()
    except HostKeyChanged as e:
        return e.hint
    return ""


async def test_two_processes_that_meet_a_host_at_once_agree_on_its_key(hosts: Hosts) -> None:
    pins = HostKeyPins.here()
    shown = [plain(asyncssh.generate_private_key("ssh-ed25519")) for _ in range(8)]
    agreed = await asyncio.gather(*(asyncio.to_thread(pins.pin, "u@h.example:2222", key) for key in shown))
    assert len(set(agreed)) == 1
    assert pins.of("other@h.example:2222") == agreed[0]  # the machine's, whoever logs in
    pins.repin("u@h.example:2222", shown[7])
    assert pins.of("u@h.example:2222") == shown[7]
    assert pins.of("u@h.example:22") == ""


def test_a_host_key_that_is_none_is_an_error_of_its_entry(hosts: Hosts) -> None:
    hosts.add(host_key="SHA256:not-a-key")
    with pytest.raises(ConfigError, match="entry 1: host_key is no public key"):
        read_hosts(hosts.list)


def _spawn(server: Sshd) -> int:
    """A process that a bootstrap has left on this host."""
    assert server.home is not None
    (server.home / ".uvcc").mkdir()
    env = {**os.environ, "HOME": str(server.home), "UVCC_ROOT": f"{server.home}/.uvcc"}
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    return subprocess.Popen(command, env=env, start_new_session=True).pid


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _trace(server: Sshd) -> bool:
    """Whether anything of ours is left on this host."""
    assert server.home is not None
    lines = server.authorized.read_text()
    return os.path.lexists(server.home / ".uvcc-claim") or (server.home / ".uvcc").exists() or "uvcc-operator" in lines


async def _all_up(hosts: Hosts) -> tuple[Rollout, list[int]]:
    ctx = hosts.rollout()
    for member in ctx.members.values():
        await provision.one_pod(ctx, member)
    return ctx, [_spawn(server) for server in hosts.servers]


async def uvcc(command: str) -> int:
    """A command in this process, with an event loop of its own."""
    return await asyncio.to_thread(main, shlex.split(command)[1:])


async def _named(ctx: Rollout, capsys: pytest.CaptureFixture[str]) -> str:
    """The command that the tear-down of the run names for what is left, as the operator reads it."""
    ctx.bus.commit(ev.RunEnded(status="failed", leaks=[f"uvcc-{RUN}-p1r0"]))
    assert await uvcc(f"uvcc teardown {RUN}") == 1
    said = capsys.readouterr().err
    return said.partition("end it with: ")[2].splitlines()[0]


async def test_a_changed_key_keeps_only_its_own_host(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        hosts.add()
    ctx, pids = await _all_up(hosts)
    changed = hosts.servers[1]
    changed.down()
    changed.new_host_key()
    changed.up()
    assert await provision.teardown(ctx) == [f"uvcc-{RUN}-p1r0"]
    assert [_lives(pid) for pid in pids] == [False, True, False]
    assert [_trace(server) for server in hosts.servers] == [False, True, False]
    alerts = ctx.bus.snapshot.alerts
    assert len(alerts) == 1  # once, with everything: the name, both fingerprints, the command
    assert f"pod uvcc-{RUN}-p1r0 is not proven gone" in alerts[0].text
    assert changed.fingerprint in alerts[0].text
    assert {n: p.state for n, p in ctx.bus.snapshot.pods.items()} == {"p0r0": "gone", "p1r0": "lost", "p2r0": "gone"}
    command = await _named(ctx, capsys)
    assert command == f"uvcc pods --end uvcc-{RUN}-p1r0 --host-key {changed.fingerprint}"
    code = await uvcc("uvcc pods")
    assert (code, "may be there, nobody can tell" in capsys.readouterr().err) == (3, True)
    assert await uvcc("uvcc pods --sweep") == 3
    assert command in capsys.readouterr().err
    other = "SHA256:" + "A" * 43  # somebody's word for another key than the machine shows opens nothing
    assert await uvcc(f"uvcc pods --end uvcc-{RUN}-p1r0 --host-key {other}") == 1
    assert _lives(pids[1])
    assert await uvcc(command) == 0
    assert not _lives(pids[1])
    assert not _trace(changed)
    assert await uvcc(f"uvcc teardown {RUN}") == 0
    assert await uvcc("uvcc pods --sweep") == 0
    assert HostKeyPins.here().of(changed.address) == changed.host_key
    await ctx.provider.close()


@pytest.mark.parametrize(
    "trouble",
    [
        "frozen",
        pytest.param("off", marks=pytest.mark.ci(__file__)),
        pytest.param("forced", marks=pytest.mark.ci(__file__)),
    ],
)
async def test_a_host_that_does_not_answer_keeps_no_other(
    hosts: Hosts, trouble: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        hosts.add()
    ctx, pids = await _all_up(hosts)
    sick = hosts.servers[1]
    if trouble == "frozen":
        made = PodLink.__init__

        def impatient(self: PodLink, name: str, address: str, *args: Any, **more: Any) -> None:
            """With the one that will not answer; the others have the time of a busy machine."""
            quick = address.endswith(f":{sick.port}")
            more["timeouts"] = replace(QUICK, connect=1.0, login=1.0, operation=2.0) if quick else QUICK
            made(self, name, address, *args, **more)

        monkeypatch.setattr(PodLink, "__init__", impatient)
        ctx.provider = hosts.provider()
        sick.freeze()
    else:
        sick.down()
    if trouble == "forced":
        sick.more = ["ForceCommand echo no shell here"]
        sick.up()
        ctx.provider = hosts.provider()
    assert await provision.teardown(ctx) == [f"uvcc-{RUN}-p1r0"]
    assert [_lives(pid) for pid in pids] == [False, True, False]
    assert len(ctx.bus.snapshot.alerts) == 1
    reason = {"frozen": "gave no answer in time", "off": "refuses connections", "forced": "forced command"}[trouble]
    assert reason in ctx.bus.snapshot.alerts[0].text
    command = await _named(ctx, capsys)
    assert await uvcc("uvcc pods --sweep") == 3
    if trouble == "frozen":
        sick.freeze(signal.SIGCONT)
    else:
        sick.down()
        sick.more = []
        sick.up()
    assert await uvcc(command) == 0
    assert not _lives(pids[1])
    assert not any(_trace(server) for server in hosts.servers)
    assert await uvcc("uvcc pods") == 0
    await ctx.provider.close()


async def test_what_was_never_claimed_is_no_leak(hosts: Hosts) -> None:
    """No host answers and none ever did: the run leaves nothing behind, and `uvcc pods` fails for none of them."""
    for _ in range(3):
        hosts.add()
    for server in hosts.servers:
        server.down()
    ctx = hosts.rollout()
    for member in ctx.members.values():
        with pytest.raises(UvccError, match="can be claimed"):
            await provision.one_pod(ctx, member)
    assert await provision.teardown(ctx) == []
    assert ctx.bus.snapshot.alerts == ()
    ctx.bus.commit(ev.RunEnded(status="failed"))
    await ctx.provider.close()
    assert await uvcc("uvcc pods --sweep") == 0


async def test_a_dead_host_is_in_nobodys_way_and_a_claimed_one_is_unknown(
    hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts.add(), hosts.add()
    ctx = hosts.rollout()
    hosts.servers[1].down()
    await provision.one_pod(ctx, ctx.members["p0r0"])
    ctx.bus.commit(ev.RunEnded(status="failed"))
    assert await uvcc("uvcc pods") == 0
    assert "no run here asked for a claim on it" in capsys.readouterr().err
    hosts.servers[0].down()
    assert await uvcc("uvcc pods --json") == 3
    rows: Callable[[str], list] = json.loads
    (row,) = rows(capsys.readouterr().out)
    assert (row["name"], row["fate"], bool(row["doubt"])) == (f"uvcc-{RUN}-p0r0", "ORPHAN", True)
    hosts.servers[0].up()
    assert await uvcc("uvcc pods --sweep") == 0
    assert not _trace(hosts.servers[0])
    await ctx.provider.close()
