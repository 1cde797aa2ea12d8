"""AgentClient against an agent in this process: acknowledgements, streams, and links that break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from agentfake import AgentFake
from sshfake import SshFake

from uvcc_console.fleet import backlog
from uvcc_console.fleet.agent_client import AgentClient
from uvcc_engine.contract.agent_protocol import wire
from uvcc_engine.contract.agent_protocol.agent_commands import HaltCommand, LaunchCommand, ProbeCommand, WatchCommand
from uvcc_engine.contract.agent_protocol.agent_messages import AgentMessage, Lines, Telemetry, WorkerChange
from uvcc_engine.contract.errors import UnreachableError, UvccError, VerificationError
from uvcc_engine.contract.run_files.records import Malformed


@pytest.fixture
async def client_of(ssh_fake, link_to, agent_fake: AgentFake) -> AsyncIterator[Callable]:
    made: list[AgentClient] = []

    async def make(**options: object) -> tuple[SshFake, AgentClient]:
        host = await ssh_fake(agent_fake)
        client = AgentClient(link_to(host.address), **options)
        made.append(client)
        return host, client

    yield make
    for client in made:
        await client.close()


def _lines(message: AgentMessage | Malformed) -> list[str]:
    return list(message.lines) if isinstance(message, Lines) else []


async def test_hello_names_the_holder_and_its_answer_is_kept(client_of, agent_fake: AgentFake) -> None:
    agent_fake.answers[wire.HELLO] = lambda m: {"agent": "x", "pid": 7}
    host, client = await client_of(holder="haltd", lease_s=60.0, cursors={"r.full/events.jsonl": (5, 100)})
    hello = await client.start()
    assert hello["pid"] == 7
    said = agent_fake.of(wire.HELLO)[0]
    assert (said["holder"], said["lease_s"]) == ("haltd", 60.0)
    assert said["cursors"] == {"r.full/events.jsonl": [5, 100]}
    assert host.commands == ["exec /bin/sh .uvcc/attach"]


async def test_each_request_gets_its_own_acknowledgement(client_of, agent_fake: AgentFake) -> None:
    agent_fake.answers[wire.WATCH] = lambda m: {"echo": m["run"]}
    _, client = await client_of()
    await client.start()
    acks = await asyncio.gather(*(client.request(WatchCommand(run=f"r{n}")) for n in range(50)))
    assert [a["echo"] for a in acks] == [f"r{n}" for n in range(50)]


async def test_a_refusal_carries_the_agents_words(client_of, agent_fake: AgentFake) -> None:
    agent_fake.answers["launch"] = lambda m: {"ok": False, "error": "no such run", "hint": "launch it first"}
    _, client = await client_of()
    await client.start()
    with pytest.raises(UvccError, match="no such run") as caught:
        await client.request(LaunchCommand(run="x", workers=[]))
    assert caught.value.hint == "launch it first"


async def test_silence_is_unreachable_and_names_the_command(client_of, agent_fake: AgentFake) -> None:
    agent_fake.answers["probe"] = lambda m: None
    _, client = await client_of()
    await client.start()
    with pytest.raises(UnreachableError, match="did not acknowledge probe"):
        await client.request(ProbeCommand(), timeout=0.05)


async def test_a_lost_link_fails_what_waits_and_comes_back_by_itself(client_of, agent_fake: AgentFake) -> None:
    seen: list[bool] = []
    back = asyncio.Event()

    def on_link(up: bool, detail: str) -> None:
        seen.append(up)
        if seen == [True, False, True]:
            back.set()

    agent_fake.answers["probe"] = lambda m: None
    host, client = await client_of(on_link=on_link)
    await client.start()
    waiting = asyncio.create_task(client.request(ProbeCommand()))
    await agent_fake.until("probe")
    host.drop()
    with pytest.raises(UnreachableError):
        await waiting
    await asyncio.wait_for(back.wait(), 120)
    agent_fake.answers["probe"] = lambda m: {}
    assert (await client.request(ProbeCommand()))["ok"]


async def test_watching_goes_on_from_the_cursor_after_a_reconnect(client_of, agent_fake: AgentFake) -> None:
    host, client = await client_of()
    await client.start()
    await client.watch("r.full")
    got = client.messages()
    agent_fake.tell(op="lines", run="r.full", src="events.jsonl", ino=9, off=64, seq=1, ts=0.0, lines=["a", "b"])
    assert _lines(await anext(got)) == ["a", "b"]
    host.drop()
    watches = await agent_fake.until(wire.WATCH, 2)
    assert watches[1]["cursors"] == {"r.full/events.jsonl": [9, 64]}
    assert agent_fake.of(wire.HELLO)[1]["cursors"] == {"r.full/events.jsonl": [9, 64]}
    agent_fake.tell(op="lines", run="r.full", src="events.jsonl", ino=9, off=66, seq=2, ts=0.0, lines=["c"])
    assert _lines(await anext(got)) == ["c"]


async def test_acknowledgements_pass_even_if_nobody_reads_the_stream(client_of, agent_fake: AgentFake) -> None:
    _, client = await client_of()
    await client.start()
    for n in range(6000):
        agent_fake.tell(op="telemetry", ts=float(n), cpu=0.0)
    assert (await client.request(ProbeCommand()))["ok"]
    assert client.dropped > 0


@pytest.mark.ci(__file__)
async def test_a_reader_that_is_slow_loses_nothing_and_acknowledgements_pass(client_of, agent_fake: AgentFake) -> None:
    """What it cannot take stays in the pod's files and is asked for again from where it stopped."""
    total, name = 3 * backlog.MOST, "r.full/events.jsonl"

    def stream(message: dict[str, Any]) -> None:
        """The file from the cursor on, a line a message, as an agent that has not yet heard of a pause."""
        if message["op"] == wire.WATCH:
            at = message["cursors"].get(name, [9, 0])[1]
            for n in range(at, total):
                line = {"run": "r.full", "src": "events.jsonl", "lines": [str(n)]}
                agent_fake.tell(op="lines", **line, ino=9, off=n + 1, seq=n, ts=0.0)
            agent_fake.tell(op="proc", run="r.full", coord="p0r0s0t0", pid=1, state="exited", rc=0, signal="", ts=0.0)

    agent_fake.after = stream
    _, client = await client_of()
    await client.start()
    got = client.messages()
    agent_fake.tell(op="telemetry", ts=1.0)
    assert isinstance(await anext(got), Telemetry)
    await client.watch("r.full")
    await agent_fake.until(wire.UNWATCH)
    assert (await client.request(ProbeCommand()))["ok"]  # though nobody has read a line
    lines, ends = [], 0
    while len(lines) < total:
        message = await anext(got)
        lines += _lines(message)
        ends += isinstance(message, WorkerChange)
    assert lines == [str(n) for n in range(total)]
    assert ends >= 1  # said once, so never left out
    assert all(m["afresh"] for m in agent_fake.of(wire.WATCH)[1:])
    assert client.dropped == 0


async def test_garbage_is_counted_and_the_session_goes_on(client_of, agent_fake: AgentFake) -> None:
    links: list[bool] = []
    _, client = await client_of(on_link=lambda up, detail: links.append(up))
    await client.start()
    got = client.messages()
    out = agent_fake.attached[0].stdout
    out.write(b"Traceback (most recent call last):\n\xff\x00\n" + b"[" * 100_000 + b"\n")
    out.write(b'{"op":"lines","run":"r","src":"a","ino":"x","off":1,"lines":[]}\n{"op":"ack"}\n')
    agent_fake.tell(op="telemetry", ts=4.0)
    seen = [await asyncio.wait_for(anext(got), 120) for _ in range(6)]
    assert [type(m) for m in seen] == [*[Malformed] * 5, Telemetry]
    assert "Traceback" in seen[0].why
    assert client.malformed == 5
    assert links == [True]
    assert await client.request(ProbeCommand())  # commands still get through


async def test_a_bridge_that_cannot_start_says_why(ssh_fake, link_to) -> None:
    async def broken(process) -> None:
        process.stderr.write(b"/bin/sh: .uvcc/attach: not found\n")
        process.exit(127)

    host = await ssh_fake(broken)
    client = AgentClient(link_to(host.address))
    with pytest.raises(UnreachableError, match="not found"):
        await client.start(patience_s=5.0)
    await client.close()


async def test_a_close_while_a_session_ends_is_not_lost(ssh_fake, link_to, monkeypatch) -> None:
    async def silent(process) -> None:
        await process.wait_closed()

    host = await ssh_fake(silent)
    client = AgentClient(link_to(host.address))

    async def refused() -> None:
        await asyncio.sleep(0)  # the reader has begun
        raise UnreachableError("no answer")

    async def read(process) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            client._keeper.cancel()  # as close does, at the very moment when the session waits for its reader

    monkeypatch.setattr(client, "_greet", refused)
    monkeypatch.setattr(client, "_read", read)
    client.begin()
    await asyncio.wait({client._keeper}, timeout=120)
    assert client._keeper.cancelled()


async def test_a_changed_host_key_ends_the_client(client_of, ssh_fake, agent_fake: AgentFake) -> None:
    down = asyncio.Event()
    host, client = await client_of(on_link=lambda up, detail: None if up else down.set())
    await client.start()
    await host.stop()
    await ssh_fake(agent_fake, port=host.port)
    await asyncio.wait_for(down.wait(), 120)
    with pytest.raises(VerificationError):
        await client.request(ProbeCommand())


async def test_posting_puts_the_bytes_on_their_way_before_it_returns(client_of, agent_fake: AgentFake) -> None:
    host, client = await client_of()
    assert client.post(HaltCommand(run="r", mode="hold"), nonce="n") is None  # not attached yet
    await client.start()
    answer = client.post(HaltCommand(run="r", mode="hold"), nonce="n")
    assert answer is not None
    assert (await answer).ok
    assert agent_fake.of(wire.HALT)[0]["mode"] == "hold"
    agent_fake.answers[wire.HALT] = lambda m: None
    lost = client.post(HaltCommand(run="r", mode="halt"), nonce="n")
    assert lost is not None
    host.drop()
    with pytest.raises(UnreachableError):
        await lost


async def test_the_clock_skew_of_the_pod_is_known(client_of, agent_fake: AgentFake) -> None:
    import time

    agent_fake.answers[wire.HELLO] = lambda m: {"ts": time.time() + 3600.0}
    _, client = await client_of()
    begun = time.time()
    await client.start()
    assert abs(client.clock_skew - 3600.0) < 2.0 + time.time() - begun


async def test_a_reboot_is_noticed_at_the_next_hello(client_of, agent_fake: AgentFake) -> None:
    told: list[tuple[bool, str]] = []
    back = asyncio.Event()

    def on_link(up: bool, detail: str) -> None:
        told.append((up, detail))
        if len(told) == 3:
            back.set()

    agent_fake.answers[wire.HELLO] = lambda m: {"boot_id": "one"}
    host, client = await client_of(on_link=on_link)
    await client.start()
    agent_fake.answers[wire.HELLO] = lambda m: {"boot_id": "two"}
    host.drop()
    await asyncio.wait_for(back.wait(), 120)
    assert told[0] == (True, "")
    assert told[2][0] is True
    assert "rebooted" in told[2][1]
