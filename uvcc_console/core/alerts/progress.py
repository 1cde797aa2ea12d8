"""Do the workers live, move, and move together?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from uvcc_console.core.alerts.finding import Finding, middle, step_time, training, usual_and_recent
from uvcc_console.core.snapshot import Snapshot, WorkerView
from uvcc_engine.contract.parsing.untrusted import as_int, scalar_text
from uvcc_engine.contract.run_files.waiting import Waiting

SILENT_S = 15.0  # a heartbeat is due every 5 s
STUCK_STEPS, STUCK_S = 10, 30.0
UNREACHED_S = 15.0  # workers of several conductors do not start at the same moment
UNREACHED_HINT = (
    "let the others in at the ports of link: direct; nc -vz ADDRESS PORT from there tells; F9 ends the wait"
)
RELAY_AWAY_S = 10.0  # a relay that died is there again within a few
SLOWER = 2.0
BEHIND = 2


def stalled_heartbeat(s: Snapshot, now: float) -> Iterator[Finding]:
    """A worker said nothing for three beats, or for as long as its pod's own longest step may last."""
    limit = max(SILENT_S, 3 * step_time(s))
    for w in training(s):
        age = now - w.beat_ts
        if age > limit or age < -limit:  # of a later time than now: from before this machine's clock was set back
            since = f"for {age:.0f} s" if age > 0 else "since this machine's clock was set back"
            text = f"no heartbeat {since} (last step {w.step}, limit {limit:.0f} s)"
            yield Finding(
                "stalled_heartbeat", text, "look at its pod: log, shell; F9 if it does not come back", w.coord, "error"
            )


def slow_but_alive(s: Snapshot, now: float) -> Iterator[Finding]:
    """Steps come, but take twice what this run usually takes."""
    for w in training(s):
        found = usual_and_recent(s, w.coord, "step_s")
        if found and found[0] > 0 and found[1] > SLOWER * found[0] and now - w.beat_ts <= SILENT_S:
            text = f"a step takes {found[1]:.2f} s, usual is {found[0]:.2f} s"
            yield Finding(
                "slow_but_alive", text, "see who waits for whom in panel 4; a stack dump shows where", w.coord
            )


def collective(beat: Mapping[str, Any]) -> tuple[str, int]:
    """(what, sequence number) of a heartbeat's last collective; (\"\", -1) if it told none.

    Trainers tell it as a mapping, as "name #number", or as a name with ``collective_seq`` beside it.
    """
    last: Any = beat.get("last_collective")
    if isinstance(last, Mapping):
        return " ".join(scalar_text(last[k]) for k in ("group", "op") if k in last), _number(last.get("seq"))
    text = scalar_text(last)
    what, mark, number = text.rpartition(" #")
    if mark and number.isascii() and number.isdigit() and len(number) < 19:
        return what, int(number)
    return text, _number(beat.get("collective_seq"))


def _number(value: object) -> int:
    found = as_int(value)
    return -1 if found is None else found


def first_that_differs(workers: list[WorkerView]) -> str:
    """The first rank whose last collective is not the one that most are in; empty where all agree."""
    told = [(w, collective(w.beat)) for w in sorted(workers, key=lambda w: (as_int(w.beat.get("rank")) or 0, w.coord))]
    told = [(w, c) for w, c in told if c != ("", -1)]
    if not told:
        return ""
    usual = Counter(c for _, c in told).most_common(1)[0][0]
    for w, c in told:
        if c != usual:
            return f"{w.coord} is in {c[0] or 'no collective'} #{c[1]}, the others in {usual[0]} #{usual[1]}"
    return ""


def relay_away_s(s: Snapshot, now: float) -> float:
    """For how long workers have made no step because what stands between the parties is away; 0 if it is not so."""
    workers = [w for w in training(s) if w.pod in s.outages]
    found = min((min(now - w.step_ts, now - s.outages[w.pod].ts) for w in workers), default=0.0)
    return found if found > RELAY_AWAY_S else 0.0


def relay_away(s: Snapshot, now: float) -> Iterator[Finding]:
    """The relay, or the broker, that the parties' messages go through is out of reach, and the run stands still."""
    if not (seconds := relay_away_s(s, now)):
        return
    found = min(s.outages.values(), key=lambda o: o.ts)
    what = "NATS server" if urlsplit(found.url).scheme in ("nats", "tls") else "relay"
    whose = ", ".join(sorted(s.outages))
    if what == "relay":
        text = f"the relay {found.url} is out of reach of {whose} for {seconds:.0f} s: {found.why}"
        own = "its pod starts it again by itself; else "
    else:  # one that is full is there, and to start it again makes no room
        text = f"the NATS server {found.url} passes no message of {whose} for {seconds:.0f} s: {found.why}"
        own = "the run waits, and goes on once that is mended or the server is up again; else "
    yield Finding("relay_away", text, f"{own}F9, then uvcc resume {s.run}", level="error")


def peer_unreached(s: Snapshot, now: float) -> Iterator[Finding]:
    """A worker waits for a party with which it never had a connection: in a network of strangers, mostly a firewall."""
    for w in s.workers.values():
        told, waits = s.waits.get(w.coord), Waiting.of(w.beat)
        if told is None or not told.why or waits is None or w.state == "exited" or s.status != "running":
            continue
        lasts = waits.since_s or 0.0  # the wait that was told goes on, or another one began
        if waits.whom == told.peer and lasts >= max(UNREACHED_S, told.since_s) and now - w.beat_ts <= SILENT_S:
            text = f"waits for {told.peer} for {lasts:.0f} s: {told.why}"
            yield Finding("peer_unreached", text, UNREACHED_HINT, w.coord, "error")


def hang_in_collective(s: Snapshot, now: float) -> Iterator[Finding]:
    """Everybody lives and nobody makes a step: they wait in a collective, and one rank is not where the others are."""
    if relay_away_s(s, now):
        return  # that is why, and it has an alert of its own
    workers = training(s)
    alive = [w for w in workers if now - w.beat_ts <= SILENT_S]
    foretold = s.foretold.seconds if s.foretold is not None else 0.0  # before a step was measured, all that is known
    limit = max(STUCK_S, STUCK_STEPS * max(step_time(s), foretold))
    if not alive or len(alive) < len(workers) or min(now - w.step_ts for w in alive) < limit:
        return
    differs = first_that_differs(alive)
    waits = sorted({str(waiting) for w in alive if (waiting := Waiting.of(w.beat)) is not None})
    text = f"no step for {min(now - w.step_ts for w in alive):.0f} s at step {min(w.step for w in alive)}"
    text += f"; first that differs: {differs}" if differs else f"; they wait for {', '.join(waits)}" if waits else ""
    yield Finding(
        "hang_in_collective", text, "D dumps every stack; then F9, T proposes the next single change", level="error"
    )


def straggler(s: Snapshot, now: float) -> Iterator[Finding]:
    """One worker is behind the others of its party."""
    workers = training(s)
    usual = middle(float(w.step) for w in workers)
    for w in workers:
        if len(workers) > 2 and usual - w.step > BEHIND:
            text = f"at step {w.step}, the others at {usual:.0f}"
            yield Finding("straggler", text, "restart its worker, or replace its pod if it stays behind", w.coord)


def skew_between_parties(s: Snapshot, now: float) -> Iterator[Finding]:
    """The parties are not at the same step."""
    steps: dict[str, list[float]] = {}
    for w in training(s):
        steps.setdefault(w.coord[:2], []).append(float(w.step))
    medians = {party: middle(found) for party, found in steps.items()}
    if len(medians) > 1 and max(medians.values()) - min(medians.values()) > BEHIND:
        text = ", ".join(f"P{party[1:]} at {step:.0f}" for party, step in sorted(medians.items()))
        slow = min(medians, key=lambda party: medians[party])
        yield Finding("skew_between_parties", text, "see the link of the party that is behind, panel 4", f"P{slow[1:]}")


DETECTORS = (
    stalled_heartbeat,
    slow_but_alive,
    relay_away,
    peer_unreached,
    hang_in_collective,
    straggler,
    skew_between_parties,
)
