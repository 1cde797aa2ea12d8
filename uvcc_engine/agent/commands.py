"""The commands of a console, one function each.

A function returns the fields of its acknowledgement, or None if it will be acknowledged later through
``AgentPort.settle``. What it raises as UvccError is the refusal.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from uvcc_engine.agent import party, pod_probe
from uvcc_engine.agent.command_front import Key
from uvcc_engine.agent.console_channel import Console
from uvcc_engine.agent.halts import HaltWatch
from uvcc_engine.agent.lease import Lease
from uvcc_engine.agent.relays import RelayTable
from uvcc_engine.agent.workers import Worker, WorkerTable
from uvcc_engine.contract import files, flight, wire
from uvcc_engine.contract.control import MODES, HaltRequest
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.link_spec import RelayPlace
from uvcc_engine.contract.spec import WorkerSpec

_KEYED: Final = ("private", "preflight", "handover")  # kinds of worker that speak for their party
Message = Mapping[str, Any]
Fields = dict[str, Any]
SIGNALS: Final = {"USR1": signal.SIGUSR1, "TERM": signal.SIGTERM, "KILL": signal.SIGKILL}


class AgentPort(Protocol):
    """What the commands need of the agent that obeys them."""

    root: Path
    workers: WorkerTable
    relays: RelayTable
    halts: dict[str, HaltWatch]
    lease: Lease

    def describe(self) -> dict[str, Any]: ...
    def run_dir(self, run: str) -> Path: ...
    def proc_message(self, worker: Worker) -> dict[str, Any]: ...
    def hurry(self) -> None: ...
    def halt(self, asked: HaltRequest) -> list[dict[str, Any]]: ...
    def launch(self, specs: Sequence[WorkerSpec], key: Key) -> None: ...
    def await_relay(self, run: str, key: Key) -> None: ...
    def await_probe(self, query: pod_probe.GpuQuery, key: Key) -> None: ...
    def begin_stop(self, grace_s: float, key: Key | None = None) -> None: ...


def hello(agent: AgentPort, console: Console, m: Message) -> Fields:
    console.greeted = True
    console.holder = str(m.get("holder", ""))
    console.lease_s = float(m.get("lease_s") or 0.0)
    console.learn_cursors(m.get("cursors") or {})
    if console.lease_s > 0:
        agent.lease.renew(console.lease_s, console.holder, time.monotonic())
    return agent.describe()


def watch(agent: AgentPort, console: Console, m: Message) -> Fields:
    run = files.checked_run_id(str(m["run"]))
    if m.get("afresh"):
        console.unwatch(run)
    console.learn_cursors(m.get("cursors") or {})
    console.watch(run, agent.run_dir(run))
    workers = agent.workers.of_run(run)
    for worker in workers:
        console.send(agent.proc_message(worker))
    agent.hurry()
    return {"exists": agent.run_dir(run).is_dir(), "workers": [w.summary() for w in workers]}


def unwatch(agent: AgentPort, console: Console, m: Message) -> Fields:
    """What is not streamed stays in the files until the console asks again."""
    console.unwatch(files.checked_run_id(str(m["run"])))
    return {}


def launch(agent: AgentPort, console: Console, m: Message) -> Fields | None:
    """Fork one process per spec. A launch of what already runs in the same attempt changes nothing."""
    run = files.checked_run_id(str(m["run"]))
    specs = [WorkerSpec.from_json(s) for s in m["workers"]]
    if not specs or any(s.run != run for s in specs) or len({s.coord for s in specs}) != len(specs):
        raise ConfigError(f"the workers to launch are not distinct workers of run {run}", "send one spec per worker")
    live = {w.spec.coord: w for w in agent.workers.live(run)}
    if all(s.coord in live and live[s.coord].spec.attempt == s.attempt for s in specs):
        return {"workers": [live[s.coord].summary() for s in specs], "already": True}
    for s in specs:
        if s.coord in live:
            raise UvccError(f"worker {s.coord} of {run} still runs (pid {live[s.coord].id.pid})", "halt it first")
    specs = _placed(agent, specs, [w.spec for w in live.values()])
    try:
        _clear_remains(specs, alone=not live)
    except OSError as error:
        raise files.write_failed(Path(specs[0].dir), error) from error
    if not live:
        agent.halts.pop(run, None)
    agent.launch(specs, (wire.LAUNCH, str(m.get("nonce", ""))))
    return None


def _placed(agent: AgentPort, specs: list[WorkerSpec], running: list[WorkerSpec]) -> list[WorkerSpec]:
    """With absolute directories, this pod's identity, and one lead per directory: the lowest rank."""
    lead = min((s.rank, s.coord) for s in [*specs, *running])
    some_lead = any(s.lead for s in running)
    placed = []
    for s in specs:
        where = agent.root / os.path.expanduser(s.dir or f"runs/{s.run}")
        identity = s.identity_dir or (os.fspath(agent.root / "identity") if s.kind in _KEYED else "")
        leads = (s.rank, s.coord) == lead and not some_lead
        placed.append(replace(s, dir=os.fspath(where), identity_dir=identity, lead=leads))
    return _as_world(placed)


def _as_world(specs: list[WorkerSpec]) -> list[WorkerSpec]:
    """If these are all ranks of their party's world, tell them where to meet, as torchrun would (``env://``).

    Worlds that span pods get these variables from the console.
    """
    world = specs[0].world
    if len(specs) < 2 or len(specs) != world or any("RANK" in s.env for s in specs):
        return specs
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    order = sorted(s.rank for s in specs)
    return [
        replace(s, env={"RANK": str(s.rank), "LOCAL_RANK": str(order.index(s.rank)), **common, **s.env}) for s in specs
    ]


def _clear_remains(specs: list[WorkerSpec], *, alone: bool) -> None:
    """Nothing of an earlier attempt may be obeyed or believed."""
    for s in specs:
        directory = Path(s.dir)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if alone:
            (directory / files.HALT).unlink(missing_ok=True)
            (directory / files.LINK).unlink(missing_ok=True)
        for name in (files.exit_name, files.result_name):
            for lead in (False, s.lead):
                (directory / name(s.rank, lead=lead)).unlink(missing_ok=True)


def halt(agent: AgentPort, console: Console, m: Message) -> Fields:
    mode, run, nonce = str(m["mode"]), files.checked_run_id(str(m["run"])), str(m.get("nonce", ""))
    if mode not in MODES:
        raise ConfigError(f"unknown halt mode {mode!r}", f"one of {', '.join(MODES)}")
    after = float(m.get("deadline_s") or 0.0)
    asked = HaltRequest(mode, nonce, run, time.time() + after if after > 0 else 0.0)
    return {"workers": agent.halt(asked)}


def send_signal(agent: AgentPort, console: Console, m: Message) -> Fields:
    """USR1 goes to the worker alone (it dumps its stacks); TERM and KILL to its whole process group."""
    name, coord = str(m["signal"]), m.get("coord")
    if name not in SIGNALS:
        raise ConfigError(f"unknown signal {name!r}", f"one of {', '.join(SIGNALS)}")
    chosen = [w for w in agent.workers.of_run(str(m["run"])) if coord in (None, "", w.spec.coord)]
    alone = name == "USR1"
    sent = [w.spec.coord for w in chosen if (w.id.send if alone else w.id.send_group)(SIGNALS[name])]
    return {"sent": sent}


def ask_flight(agent: AgentPort, console: Console, m: Message) -> Fields:
    """Have the live workers of a run tell what their collectives are at; they answer in files, within a second."""
    run = files.checked_run_id(str(m["run"]))
    live = agent.workers.live(run)
    for directory in {w.spec.dir for w in live}:
        flight.ask(Path(directory), run, str(m.get("nonce", "")))
    return {"asked": [w.spec.coord for w in live]}


def policy(agent: AgentPort, console: Console, m: Message) -> Fields:
    return party.sign_policy(agent.root / "identity", str(m["policy"]))


def relay(agent: AgentPort, console: Console, m: Message) -> Fields | None:
    run, action = files.checked_run_id(str(m["run"])), str(m["action"])
    if action == "start":
        agent.relays.start(run, m.get("config") or {})
        agent.await_relay(run, (wire.RELAY, str(m.get("nonce", ""))))
        return None
    if action == "stop":
        return {"stopped": agent.relays.stop(run)}
    raise ConfigError(f"unknown relay action {action!r}", "start or stop")


def relink(agent: AgentPort, console: Console, m: Message) -> Fields:
    """Tell the run's workers on this pod where their relay is now; they go on there by themselves."""
    run, place = files.checked_run_id(str(m["run"])), RelayPlace.from_json(m["link"])
    folders = sorted({Path(w.spec.dir) for w in agent.workers.live(run)})
    if not folders:
        raise UvccError(f"no worker of run {run} is running on this pod", "launch it with the new link")
    for folder in folders:
        files.write_json(folder / files.LINK, place.to_json(), mode=0o600)
    return {"told": len(agent.workers.live(run))}


def probe_pod(agent: AgentPort, console: Console, m: Message) -> Fields | None:
    agent.await_probe(pod_probe.GpuQuery(), (wire.PROBE, str(m.get("nonce", ""))))
    return None


def lease(agent: AgentPort, console: Console, m: Message) -> Fields:
    ttl = float(m["ttl_s"])
    console.lease_s = ttl
    agent.lease.renew(ttl, console.holder, time.monotonic())
    return {"ttl_s": ttl}


def stop(agent: AgentPort, console: Console, m: Message) -> Fields | None:
    agent.begin_stop(float(m.get("grace_s", 10.0)), (wire.STOP, str(m.get("nonce", ""))))
    return None


OPS: Final[Mapping[str, Callable[[AgentPort, Console, Message], Fields | None]]] = {
    wire.HELLO: hello,
    wire.WATCH: watch,
    wire.UNWATCH: unwatch,
    wire.LAUNCH: launch,
    wire.HALT: halt,
    wire.SIGNAL: send_signal,
    wire.FLIGHT: ask_flight,
    wire.POLICY: policy,
    wire.RELAY: relay,
    wire.RELINK: relink,
    wire.PROBE: probe_pod,
    wire.LEASE: lease,
    wire.STOP: stop,
}
LATER: Final = frozenset({wire.LAUNCH, wire.RELAY, wire.PROBE, wire.STOP})
