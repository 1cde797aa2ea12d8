"""What a console asks of an agent: one frozen record per command, and one way of reading them.

Every command carries a ``nonce`` and is answered by one acknowledgement with the same nonce; each may be sent again.
:func:`parse` gives a command or says what is malformed. Keys that are not known here are passed over, as a newer
console may send them; only what a worker is to do is read strictly (:class:`WorkerSpec`).
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from uvcc_engine.contract.agent_protocol import wire
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.link_spec import RelayPlace
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.run_files.control import Mode
from uvcc_engine.contract.run_files.files import checked_run_id
from uvcc_engine.contract.run_files.records import Malformed

SignalName = Literal["USR1", "TERM", "KILL"]
Cursors = dict[str, tuple[int, int]]
"""``run/file`` -> (inode, offset) where reading goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloCommand:
    """The first message of a console. ``lease_s`` > 0: the agent halts its runs when it hears nothing for so long.

    Every further message of such a console renews the lease. ``holder`` names the console in the agent's log.
    """

    version: int = 0
    cursors: Cursors = field(default_factory=dict)
    lease_s: float = 0.0
    holder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchCommand:
    """Stream the files of a run. ``afresh``: from exactly these cursors, whatever was sent before."""

    run: str
    cursors: Cursors = field(default_factory=dict)
    afresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnwatchCommand:
    """Stop streaming: this console cannot take more now; the files keep it all."""

    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """Fork one process per worker of a run."""

    run: str
    workers: Sequence[WorkerSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class HaltCommand:
    """Write a halt request. A hold that is not released within ``deadline_s`` (0 = never) is a halt."""

    run: str
    mode: Mode
    deadline_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalCommand:
    """Signal the workers of a run, or the one that ``coord`` names.

    USR1 goes to a worker alone, which dumps its stacks; TERM and KILL go to its whole process group.
    """

    run: str
    signal: SignalName
    coord: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightCommand:
    """Have the workers of a run write what their collectives are at; the acknowledgement lists them as ``asked``."""

    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCommand:
    """Check a policy (canonical JSON) and sign it; the acknowledgement carries the ``signature``.

    ``approval``: the word of the pod's own domain for exactly this policy, without which nothing is signed.
    """

    policy: str
    approval: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayCommand:
    """Start or stop the relay of a run; started, the acknowledgement carries its ``url`` and ``pid``."""

    run: str
    action: Literal["start", "stop"]
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelinkCommand:
    """The relay of a run is there now; its workers on this pod go on there by themselves."""

    run: str
    link: RelayPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCommand:
    """Say what this pod is: python, torch, GPUs, memory, disk, clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseCommand:
    """Renew the lease for ``ttl_s`` seconds; 0 gives it up."""

    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCommand:
    """End every worker (after ``grace_s`` by force) and the relays, then the agent; acknowledged when all are gone."""

    grace_s: float = 10.0


Command = (
    HelloCommand
    | WatchCommand
    | UnwatchCommand
    | LaunchCommand
    | HaltCommand
    | SignalCommand
    | FlightCommand
    | PolicyCommand
    | RelayCommand
    | RelinkCommand
    | ProbeCommand
    | LeaseCommand
    | StopCommand
)
OPS: Final[dict[str, type[Command]]] = {
    wire.HELLO: HelloCommand,
    wire.WATCH: WatchCommand,
    wire.UNWATCH: UnwatchCommand,
    wire.LAUNCH: LaunchCommand,
    wire.HALT: HaltCommand,
    wire.SIGNAL: SignalCommand,
    wire.FLIGHT: FlightCommand,
    wire.POLICY: PolicyCommand,
    wire.RELAY: RelayCommand,
    wire.RELINK: RelinkCommand,
    wire.PROBE: ProbeCommand,
    wire.LEASE: LeaseCommand,
    wire.STOP: StopCommand,
}
_NAMES: Final[dict[type[Command], str]] = {kind: op for op, kind in OPS.items()}


def parse(message: Mapping[str, Any]) -> Command | Malformed:
    """The command of a message with one of the known ``op``. Never raises."""
    op = str(message.get("op"))[:32]
    kind = OPS.get(op)
    if kind is None:
        return Malformed(f"unknown command {op!r}", "update the engine on this pod")
    known = {f.name for f in dataclasses.fields(kind)}
    given = {key: value for key, value in message.items() if key in known and value is not None}
    try:
        command: Command = strict.read(typing.cast(Any, kind), given, op)
        run = getattr(command, "run", None)
        if run is not None:
            checked_run_id(run)
    except (ConfigError, RecursionError) as error:
        hint = error.hint if isinstance(error, ConfigError) else "send less"
        return Malformed(f"{op} is malformed: {error.what if isinstance(error, ConfigError) else 'too deep'}", hint)
    return command


def op_of(command: Command) -> str:
    """The ``op`` that names it on the wire."""
    return _NAMES[type(command)]


def to_json(command: Command) -> dict[str, Any]:
    """The command as a console sends it, without its nonce."""
    found: dict[str, Any] = {f.name: getattr(command, f.name) for f in dataclasses.fields(command)}
    if isinstance(command, LaunchCommand):
        found["workers"] = [spec.to_json() for spec in command.workers]
    if isinstance(command, RelinkCommand):
        found["link"] = command.link.to_json()
    return {"op": _NAMES[type(command)], **found}
