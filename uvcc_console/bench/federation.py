"""``uvcc bench federation``: what three conductors that sign, tell and listen beside a training add to its step.

Three parties train one job to its end. Beside it the conductors' exchange at a relay (signs of life, barriers, what
the others said) goes on for a while and rests for as long, in turn, so that what the machine does meanwhile meets both
alike. All six, and the relay, share this machine's processors, which no three domains do. Nothing else of a federation
falls into a step: rosters, policy and evidence come before and after.

Wall time tells what somebody waits, and on a busy machine whose turn it was. Processor time does not depend on who else
wants the processors: of the parties' steps it tells whether they do more while the exchange goes on, of the exchange
what it takes from a machine that it shares with them.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import psutil

from uvcc_console.bench.terminal import python
from uvcc_console.core.journal.journal import Journal
from uvcc_console.federation import domain_key
from uvcc_console.federation.seat import Seat, SeatTerms
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.federated.peers import Peers
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.topology import PARTIES, Topology
from uvcc_engine.contract.machine.benchrows import Row, row
from uvcc_engine.contract.machine.turns import ratio
from uvcc_engine.transcript.signed.barriers import stages_of
from uvcc_engine.transcript.terms.proposal import Proposal, ProposedLimits, Revealed


@dataclass(frozen=True, slots=True)
class LinkTurns:
    """``one_way_s`` between two parties; the exchange goes on, or rests, for ``turn_s``, ``pairs`` times each in a run.

    A turn holds a sign of life of each domain at least, the looks between two, and some steps.
    """

    one_way_s: float
    turn_s: float
    pairs: int


LINKS: Final = {"": LinkTurns(0.0, 2.0, 16), "_20ms": LinkTurns(0.02, 6.0, 6)}
_ALWAYS_S: Final = 1e9
_STEADY: Final = "uvcc_engine.bench.work.steady"


@dataclass(frozen=True, slots=True)
class Turn:
    """A part of the training, on the monotonic clock. ``cpu``: processor seconds of the conductors, ``relay``: of the
    relay."""

    begin: float
    end: float
    on: bool
    cpu: float = 0.0
    relay: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class TurnStep:
    """A step of all three parties: from the first's begin to the last's end, and their processor seconds together."""

    begin: float
    end: float
    cpu: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def bench(runs: int = 3) -> list[Row]:
    """The rows of each kind of link; ``runs`` times its pairs of turns with and without."""
    return [found for name, link in LINKS.items() for found in rows_of(name, max(1, runs) * link.pairs, link.turn_s)]


def rows_of(name: str, pairs: int, turn_s: float) -> list[Row]:
    """The step with the exchange over the step without, by wall and by processor time, and what the exchange takes of a
    core (a conductor's share, and the relay's) and of the whole machine. Raises UvccError."""
    seconds = (2 * pairs + 1) * turn_s
    with (
        Trainers(LINKS[name].one_way_s, seconds) as trainers,
        tempfile.TemporaryDirectory(prefix="uvcc-bench-") as folder,
    ):
        turns, steps = asyncio.run(_measured(trainers, Path(folder), turn_s))
    compared = [
        _compared(f"federation_step{name}", turns, steps, lambda step: step.seconds),
        _compared(f"federation_work{name}", turns, steps, lambda step: step.cpu),
    ]
    return compared + shares(name, turns, turn_s)


def shares(name: str, turns: Sequence[Turn], turn_s: float) -> list[Row]:
    """What the exchange takes of a core and of the machine. A turn that the training's end cut short says no share:
    the clock of another process's processor time ticks too coarsely for it. Raises UvccError."""
    on = [turn for turn in turns if turn.on and turn.seconds >= turn_s]
    if not on:
        raise UvccError("no turn with the exchange was whole", "the machine is too slow for turns of this length")
    taken = sum(turn.cpu + turn.relay for turn in on) / sum(turn.seconds for turn in on) / (os.cpu_count() or 1)
    return [
        row(f"federation_conductor{name}", "share", "core", [turn.cpu / turn.seconds / PARTIES for turn in on]),
        row(f"federation_relay{name}", "share", "core", [turn.relay / turn.seconds for turn in on]),
        row(f"federation_taken{name}", "share", "machine", [taken]),
    ]


def _compared(at: str, turns: Sequence[Turn], steps: Sequence[TurnStep], of: Callable[[TurnStep], float]) -> Row:
    with_, without = paired(turns, steps, of)
    if not with_:
        raise UvccError("no turn holds a whole step", "the machine is too slow for turns of this length")
    found = ratio(with_, without)
    reference = statistics.median(without)
    return Row(at, "ratio", found.value, "with/without", len(with_), found.low, found.high, reference)


def paired(
    turns: Sequence[Turn], steps: Sequence[TurnStep], of: Callable[[TurnStep], float]
) -> tuple[list[float], list[float]]:
    """The median over the steps wholly inside each turn, as pairs of neighbours: (with, without)."""
    on, off = [], []
    for first, second in zip(turns[::2], turns[1::2], strict=False):
        middle = {}
        for turn in (first, second):
            inside = [of(step) for step in steps if turn.begin <= step.begin and step.end <= turn.end]
            if inside:
                middle[turn.on] = statistics.median(inside)
        if len(middle) == 2:
            on.append(middle[True])
            off.append(middle[False])
    return on, off


class Trainers:
    """The relay and the three parties, in processes of their own. ``url`` and ``tokens`` are the relay's."""

    def __init__(self, latency_s: float, seconds: float) -> None:
        """``latency_s`` one way between two parties; they train for ``seconds``. Raises UvccError without a relay."""
        command = [*python("-m", _STEADY), str(latency_s), str(seconds)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            found = json.loads(self._line())
        except UvccError:
            self._end()
            raise
        self.url: str = found["url"]
        self.tokens: dict[int, str] = {int(party): token for party, token in found["tokens"].items()}
        self._relay = psutil.Process(int(found["pid"]))

    def relay_cpu(self) -> float:
        """Processor seconds of the relay so far."""
        used = self._relay.cpu_times()
        return float(used.user + used.system)

    def train(self) -> list[list[tuple[float, float, float]]]:
        """Begin and end of every step on the monotonic clock, and its processor seconds, by party.

        Raises UvccError if a party fails.
        """
        assert self._process.stdin is not None
        self._process.stdin.write("train\n")
        self._process.stdin.flush()
        return [[(begin, end, cpu) for begin, end, cpu in steps] for steps in json.loads(self._line())]

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UvccError("the training of the benchmark ended early", "see what it said above")
        return line

    def _end(self) -> None:
        with self._process:  # closes its input, at which it ends, and waits for it
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()


async def _measured(trainers: Trainers, folder: Path, turn_s: float) -> tuple[list[Turn], list[TurnStep]]:
    peers, buses = _conductors(trainers, folder)
    kept = [asyncio.create_task(bus.run()) for bus in buses]
    try:
        listening = _listen(peers)
        await asyncio.gather(*(one.meet() for one in peers))
        await _rest(listening)
        training = asyncio.create_task(asyncio.to_thread(trainers.train))
        turns: list[Turn] = []
        while not training.done():
            first = len(turns) % 4 in (0, 3)  # with, without, without, with
            turns.append(await take_turn(peers, training, turn_s, trainers.relay_cpu, on=first))
        said = await training
    finally:
        for task in kept:
            task.cancel()
        await asyncio.gather(*kept, return_exceptions=True)
    steps = zip(*said, strict=True)
    return turns, [
        TurnStep(min(b for b, _, _ in s), max(e for _, e, _ in s), sum(cpu for _, _, cpu in s)) for s in steps
    ]


async def take_turn(
    peers: Sequence[Peers], training: asyncio.Task[Any], turn_s: float, relay_cpu: Callable[[], float], *, on: bool
) -> Turn:
    """Have the conductors exchange what they have to say, or rest, until the turn or the training is over."""
    listening = _listen(peers) if on else []
    begin, busy, relayed = time.monotonic(), time.process_time(), relay_cpu()
    await asyncio.wait({training}, timeout=turn_s)
    turn = Turn(begin, time.monotonic(), on, time.process_time() - busy, relay_cpu() - relayed)
    await _rest(listening)
    return turn


def _listen(peers: Sequence[Peers]) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(one.run()) for one in peers]


async def _rest(listening: Sequence[asyncio.Task[None]]) -> None:
    for task in listening:
        task.cancel()
    await asyncio.gather(*listening, return_exceptions=True)


def _conductors(trainers: Trainers, folder: Path) -> tuple[list[Peers], list[Bus]]:
    """Three domains with keys and journals of their own, and their ends of the exchange."""
    keys = [domain_key.create(at=folder / f"p{p}" / domain_key.FOLDER) for p in range(PARTIES)]
    proposal = Proposal(
        version=1,
        name="bench",
        coordinator=keys[0].public,
        domains=(keys[0].public, keys[1].public, keys[2].public),
        owners=(),
        job={"kind": "private", "model": "mlp-digits"},
        topology=Topology(),
        code_hash="00" * 32,
        reveal=(Revealed(value="loss", to="all"),),
        providers=("local", "local", "local"),
        limits=ProposedLimits(hourly=0.0, total=0.0, ttl_s=3600.0),
        created=1,
        expires=2,
        nonce="00" * 32,
    )
    terms = SeatTerms(relay=trainers.url, wait_s=60.0, silence_s=_ALWAYS_S)
    buses = [Bus(Journal(folder / f"p{p}.sqlite", source="bench")) for p in range(PARTIES)]
    seats = [Seat(proposal, p, key, trainers.tokens[p], terms) for p, key in enumerate(keys)]
    return [Peers(bus, seat, stages_of(["full"])) for bus, seat in zip(buses, seats, strict=True)], buses
