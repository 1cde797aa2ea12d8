"""The commands of a console, one function each.

A function returns the fields of its acknowledgement, or None if it will be acknowledged later through
``AgentPort.settle``. What it raises as UvccError is the refusal.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from uvcc_engine.agent import party, pod_probe
from uvcc_engine.agent.consoles.command_front import Key
from uvcc_engine.agent.consoles.console_channel import Console
from uvcc_engine.agent.halts import HaltWatch
from uvcc_engine.agent.lease import Lease
from uvcc_engine.agent.processes.relays import RelayTable
from uvcc_engine.agent.processes.workers import Worker, WorkerTable
from uvcc_engine.contract.agent_protocol import agent_commands as asked
from uvcc_engine.contract.agent_protocol import wire
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.machine.free_ports import ports
from uvcc_engine.contract.run_files import files, flight
from uvcc_engine.contract.run_files.control import HaltRequest
from uvcc_engine.contract.run_files.records import Malformed

_KEYED: Final = ("private", "preflight", "handover")  # kinds of worker that speak for their party
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
    def starting(self, run: str) -> list[WorkerSpec]: ...
    def launch(self, specs: Sequence[WorkerSpec], key: Key) -> None: ...
    def await_launch(self, run: str, coords: Set[str], key: Key) -> None: ...
    def await_relay(self, run: str, key: Key) -> None: ...
    def await_probe(self, query: pod_probe.GpuQuery, key: Key) -> None: ...
    def begin_stop(self, grace_s: float, key: Key | None = None) -> None: ...


def hello(agent: AgentPort, console: Console, m: asked.HelloCommand, nonce: str) -> Fields:
    console.greeted = True
    console.holder = m.holder
    console.lease_s = m.lease_s
    console.learn_cursors(m.cursors)
    if console.lease_s > 0:
        agent.lease.renew(console.lease_s, console.holder, time.monotonic())
    return agent.describe()


def watch(agent: AgentPort, console: Console, m: asked.WatchCommand, nonce: str) -> Fields:
    run = m.run
    if m.afresh:
        console.unwatch(run)
    console.learn_cursors(m.cursors)
    console.watch(run, agent.run_dir(run))
    workers = agent.workers.of_run(run)
    for worker in workers:
        console.send(agent.proc_message(worker))
    agent.hurry()
    return {"exists": agent.run_dir(run).is_dir(), "workers": [w.summary() for w in workers]}


def unwatch(agent: AgentPort, console: Console, m: asked.UnwatchCommand, nonce: str) -> Fields:
    """What is not streamed stays in the files until the console asks again."""
    console.unwatch(m.run)
    return {}


def launch(agent: AgentPort, console: Console, m: asked.LaunchCommand, nonce: str) -> Fields | None:
    """Fork one process per spec. A launch of what already runs or starts in the same attempt changes nothing.

    It may be asked for again before it has started: forks wait for the imports, and a console may be gone by then.
    """
    run, specs = m.run, list(m.workers)
    if not specs or any(s.run != run for s in specs) or len({s.coord for s in specs}) != len(specs):
        raise ConfigError(f"the workers to launch are not distinct workers of run {run}", "send one spec per worker")
    live = {w.spec.coord: w for w in agent.workers.live(run)}
    starting = {s.coord: s for s in agent.starting(run)}
    known = {coord: w.spec for coord, w in live.items()} | starting
    if all(s.coord in known and known[s.coord].attempt == s.attempt for s in specs):
        if any(s.coord in starting for s in specs):
            agent.await_launch(run, {s.coord for s in specs}, (wire.LAUNCH, nonce))
            return None
        return {"workers": [live[s.coord].summary() for s in specs], "already": True}
    for s in specs:
        if s.coord in starting:
            raise UvccError(f"worker {s.coord} of {run} is being started", "halt it first")
        if s.coord in live:
            raise UvccError(f"worker {s.coord} of {run} still runs (pid {live[s.coord].id.pid})", "halt it first")
    specs = _placed(agent, specs, list(known.values()))
    try:
        _clear_remains(specs, alone=not known)
    except OSError as error:
        raise files.write_failed(Path(specs[0].dir), error) from error
    if not known:
        agent.halts.pop(run, None)
    agent.launch(specs, (wire.LAUNCH, nonce))
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
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports(1)[0])}
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


def halt(agent: AgentPort, console: Console, m: asked.HaltCommand, nonce: str) -> Fields:
    deadline = time.time() + m.deadline_s if m.deadline_s > 0 else 0.0
    return {"workers": agent.halt(HaltRequest(m.mode, nonce, m.run, deadline))}


def send_signal(agent: AgentPort, console: Console, m: asked.SignalCommand, nonce: str) -> Fields:
    """USR1 goes to the worker alone (it dumps its stacks); TERM and KILL to its whole process group."""
    chosen = [w for w in agent.workers.of_run(m.run) if m.coord in (None, "", w.spec.coord)]
    alone = m.signal == "USR1"
    sent = [w.spec.coord for w in chosen if (w.id.send if alone else w.id.send_group)(SIGNALS[m.signal])]
    return {"sent": sent}


def ask_flight(agent: AgentPort, console: Console, m: asked.FlightCommand, nonce: str) -> Fields:
    """Have the live workers of a run tell what their collectives are at; they answer in files, within a second."""
    live = agent.workers.live(m.run)
    for directory in {w.spec.dir for w in live}:
        flight.ask(Path(directory), m.run, nonce)
    return {"asked": [w.spec.coord for w in live]}


def policy(agent: AgentPort, console: Console, m: asked.PolicyCommand, nonce: str) -> Fields:
    return party.sign_policy(agent.root, m.policy, m.approval)


def relay(agent: AgentPort, console: Console, m: asked.RelayCommand, nonce: str) -> Fields | None:
    if m.action == "stop":
        return {"stopped": agent.relays.stop(m.run)}
    agent.relays.start(m.run, m.config)
    agent.await_relay(m.run, (wire.RELAY, nonce))
    return None


def relink(agent: AgentPort, console: Console, m: asked.RelinkCommand, nonce: str) -> Fields:
    """Tell the run's workers on this pod where their relay is now; they go on there by themselves."""
    run = m.run
    folders = sorted({Path(w.spec.dir) for w in agent.workers.live(run)})
    if not folders:
        raise UvccError(f"no worker of run {run} is running on this pod", "launch it with the new link")
    for folder in folders:
        files.write_json(folder / files.LINK, m.link.to_json(), mode=0o600)
    return {"told": len(agent.workers.live(run))}


def probe_pod(agent: AgentPort, console: Console, m: asked.ProbeCommand, nonce: str) -> Fields | None:
    agent.await_probe(pod_probe.GpuQuery(), (wire.PROBE, nonce))
    return None


def lease(agent: AgentPort, console: Console, m: asked.LeaseCommand, nonce: str) -> Fields:
    console.lease_s = m.ttl_s
    agent.lease.renew(m.ttl_s, console.holder, time.monotonic())
    return {"ttl_s": m.ttl_s}


def stop(agent: AgentPort, console: Console, m: asked.StopCommand, nonce: str) -> Fields | None:
    agent.begin_stop(m.grace_s, (wire.STOP, nonce))
    return None


def obey(agent: AgentPort, console: Console, message: Mapping[str, Any]) -> Fields | None:
    """Obey one message. Raises UvccError, with the code MALFORMED for what is no command."""
    nonce = message.get("nonce", "")
    command = asked.parse(message) if isinstance(nonce, str) else Malformed("a nonce that is no text")
    if isinstance(command, Malformed):
        raise wire.RefusedError(wire.AckCode.MALFORMED, command.why, command.hint or "see contract/agent_protocol")
    return _OBEY[type(command)](agent, console, command, nonce)


_OBEY: Final[Mapping[type[asked.Command], Callable[[AgentPort, Console, Any, str], Fields | None]]] = {
    asked.HelloCommand: hello,
    asked.WatchCommand: watch,
    asked.UnwatchCommand: unwatch,
    asked.LaunchCommand: launch,
    asked.HaltCommand: halt,
    asked.SignalCommand: send_signal,
    asked.FlightCommand: ask_flight,
    asked.PolicyCommand: policy,
    asked.RelayCommand: relay,
    asked.RelinkCommand: relink,
    asked.ProbeCommand: probe_pod,
    asked.LeaseCommand: lease,
    asked.StopCommand: stop,
}
LATER: Final = frozenset({wire.LAUNCH, wire.RELAY, wire.PROBE, wire.STOP})
