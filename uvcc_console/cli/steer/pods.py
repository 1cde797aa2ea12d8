"""``uvcc pods``: pods that exist at the providers; ``--sweep`` deletes those left behind by this data folder's runs.

Exit codes: 0 nothing that should have gone is there; 1 something is left behind: a pod that should have gone stays;
3 nobody can tell yet: a provider, or a host that one of our runs may hold, does not answer, or a create without an
answer is too young to be proven nothing. A host that is off and on which no run here asked for a claim is named, and
fails nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uvcc_console.cli import common
from uvcc_console.cli.main import FAILED, OK
from uvcc_console.core import paths
from uvcc_console.core.paths import JOURNAL
from uvcc_console.fleet.provider import POD_PREFIX
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UnreadableError, UvccError

if TYPE_CHECKING:
    from uvcc_console.fleet.provider import Pod


UNKNOWN = 3


@dataclass
class PodSurvey:
    """What a look at the pods came to. ``left`` and ``unknown`` fail the command, ``notes`` do not."""

    rows: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    all_heard: bool = True

    @property
    def code(self) -> int:
        return FAILED if self.left else UNKNOWN if self.unknown else OK


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "pods",
        "Pods of ours that exist, and whose they are. A pod whose lease (halt.lease) nobody renews halts its workers, "
        "but a rented one costs money until it is deleted: the run's sidecar does that when the console is gone, also "
        "for kept pods whose limits.ttl is over; after a reboot of this machine the next rollout does, or --sweep. "
        "Exit codes: 0 nothing is left behind; 1 something is; 3 nobody can tell yet, because somebody does not "
        "answer or a create is too young to be proven nothing.",
    )
    parser.add_argument("--sweep", action="store_true", help="delete those whose run here is over or dead, with proof")
    parser.add_argument("--provider", action="append", default=[], metavar="NAME", help="ask this provider (local)")
    parser.add_argument("--end", default="", metavar="POD", help="end this one pod of a run that is over or dead")
    parser.add_argument("--host-key", default="", metavar="SHA256:...", help="with --end: the host's new key is this")
    parser.add_json()
    args = parser.parse_args(argv)
    if args.host_key and not args.end:
        raise ConfigError("--host-key goes with --end", "uvcc pods --end POD --host-key SHA256:...")
    if args.end:
        return _end(args.end, args.host_key, args.json)
    found = PodSurvey()
    asyncio.run(survey_pods(_known_fleets(args.provider), args.sweep, found))
    if args.sweep:
        asyncio.run(_prove(args.provider, found))
    _volumes(args.provider, found)
    if args.json:
        common.emit(list(found.rows.values()))
    else:
        for r in found.rows.values():
            fate = "swept" if r["swept"] else "one too many" if r["stray"] else r["fate"]
            fate += "?" if r["doubt"] and not r["swept"] else ""
            common.show(f"{r['name']:<44} {r['provider']:<10} {r['price_hr']:>7.2f} $/h  {r['address']:<28} {fate}")
        if not found.rows and not found.unknown and found.all_heard:  # who was not heard may have some
            common.say("no pods")
    for line in (*found.left, *found.unknown, *found.notes):
        common.say(f"uvcc: {line}")
    return found.code


def _end(name: str, host_key: str, as_json: bool) -> int:
    """End one pod, with proof, and write that down in its run's journal."""
    from uvcc_console.runs.kept_pods import run_of
    from uvcc_console.runs.sweep import LIVE, fate_of

    run = run_of(name)
    run_dir = paths.run_dir(run) if run else None
    if run_dir is None or not (run_dir / JOURNAL).exists():
        raise UnreadableError(f"no run of this data folder has a pod {name}", "see: uvcc pods")
    if fate_of(name) == LIVE:
        raise ConfigError(f"pod {name} is in use by a live run", f"uvcc teardown {run} ends all of them")
    asyncio.run(_end_one(run_dir, name, host_key))
    _note_gone(run_dir, name)
    if as_json:
        common.emit({"pod": name, "gone": True})
    else:
        common.show(f"{name}: proven gone")
    return OK


def settle(run_dir: Path, names: Collection[str]) -> None:
    """Look again for pods of a run that is over, end what is still there, and note what is proven gone."""
    for name in names:
        try:
            asyncio.run(_end_one(run_dir, name, ""))
            _note_gone(run_dir, name)
        except UvccError as e:
            common.say(f"uvcc: {name}: {e}")


def end_kept(run_dir: Path) -> list[str]:
    """End the pods that a run kept when it ended (fleet.keep_pods); the names of those that are not proven gone."""
    from uvcc_console.core.pod_states import ABSENT
    from uvcc_console.runs.kept_pods import fleet_of
    from uvcc_console.runs.sweep import LIVE, fate_of

    def there() -> list[str]:
        s = common.load_snapshot(run_dir)
        keeps = bool(fleet_of(s).get("keep_pods")) and s.status == "ok"
        return [f"{POD_PREFIX}{s.run}-{pod.pod}" for pod in s.pods.values() if keeps and pod.state not in ABSENT]

    used = [name for name in there() if fate_of(name) == LIVE]
    for name in used:
        common.say(f"uvcc: {name} is in use by a live run")
    settle(run_dir, [name for name in there() if name not in used])
    return there()


async def _end_one(run_dir: Path, name: str, host_key: str) -> None:
    from uvcc_console.fleet.inventory import InventoryProvider
    from uvcc_console.fleet.provider import Rents
    from uvcc_console.fleet.provider_kinds import provider_for, section_for

    snapshot = common.load_snapshot(run_dir)
    provider = provider_for(section_for(dict(snapshot.profile.get("fleet", {})), name), run_dir)
    try:
        if isinstance(provider, InventoryProvider):
            provider.accepted = host_key
        elif host_key:
            raise ConfigError(f"{provider.name} ends pods without logging in: --host-key is of no use", "leave it out")
        for pod in await provider.list(name):
            if pod.name == name:
                await provider.delete(pod)
        if isinstance(provider, Rents):
            others = [f"{name.rpartition('-')[0]}-{pod}" for pod in snapshot.pods if not name.endswith(f"-{pod}")]
            if left := [t for t in await provider.prove(ended=True, keep=others) if t.startswith(name)]:
                what = f"{', '.join(left)} was never answered"
                raise UnreachableError(what, "uvcc pods --sweep says when to look again")
    finally:
        await provider.close()


def _note_gone(run_dir: Path, name: str) -> None:
    """The run's journal no longer tells of a leak."""
    from uvcc_console.core import events as ev
    from uvcc_console.core.journal.journal import Journal

    s = common.load_snapshot(run_dir)
    pod = s.pods.get(name.rpartition("-")[2])
    if pod is None or pod.state == "gone":
        return
    journal = Journal(run_dir / JOURNAL, source="cli")
    try:
        at = {"party": pod.party, "replica": pod.replica, "provider": pod.provider}
        journal.append(ev.PodChanged(pod=pod.pod, state="gone", detail="ended by uvcc pods", **at))
    finally:
        journal.close()


@dataclass(frozen=True, slots=True)
class KnownFleet:
    """A way to ask for pods: the ``fleet`` mapping of a run, and that run's folder. ``used``: whether a run came so far
    that it asked for something; ``named``: by the user, now."""

    fleet: dict[str, Any]
    folder: Path
    used: bool = False
    named: bool = False


def _known_fleets(only: list[str]) -> list[KnownFleet]:
    """Every way to ask for pods that a run of this machine has used.

    This machine itself is always asked. One run stands for all that ask the same account, the same hosts with the
    same key.
    """
    from uvcc_console.fleet.cloud.intents import VOLUMES_FILE, Intents
    from uvcc_console.fleet.failover.failover_choice import chosen
    from uvcc_console.fleet.provider_kinds import DEFAULT, kind_of, runs_here, sections

    found: dict[tuple[str, ...], KnownFleet] = {(DEFAULT,): KnownFleet({"provider": DEFAULT}, paths.data_dir())}
    for run_dir in common.run_dirs():
        s, why = common.read_snapshot(run_dir)
        if why:
            common.say(f"uvcc: {run_dir.name} is unreadable, its pods are not judged: {why}")
        given = s.profile.get("fleet", {})
        for section in sections(given if isinstance(given, Mapping) else {}):
            fleet = chosen(section, run_dir)
            name = str(fleet.get("provider", DEFAULT))
            if not runs_here(fleet):
                own = ("account", "base_url", "hosts", "ssh_key")
                key = (name, *(str(fleet.get(k, "")) for k in own))
                asked = s.pods or Intents.of(run_dir).tries() or Intents(run_dir / VOLUMES_FILE).tries()
                before = found.get(key)
                if before is None or not before.used:  # who asked for pods is told of, rather than who did not
                    found[key] = KnownFleet(fleet, run_dir, bool(asked), name in only)
    known = {key[0] for key in found}
    for name in only:
        if name not in known:
            kind_of(name)  # a word that is no provider's can answer nothing
            found[(name,)] = KnownFleet({"provider": name}, paths.data_dir(), named=True)
    return [found[key] for key in sorted(found) if not only or key[0] in only]


def _volumes(only: list[str], found: PodSurvey) -> None:
    """Volumes that this machine's runs made and that are not proven gone, by what is on disk."""
    from uvcc_console.fleet.cloud.intents import VOLUMES_FILE, Intents, unended
    from uvcc_console.runs.sweep import KEPT, ORPHAN, fate_of

    for run_dir in common.run_dirs():
        shall_go = {t.name for t in unended(run_dir)}
        for t in Intents(run_dir / VOLUMES_FILE).tries().values():
            if not t.open or t.given or (only and t.provider not in only):
                continue
            fate = fate_of(t.base)
            fate = KEPT if fate == ORPHAN and t.name not in shall_go else fate
            row = {"name": t.name, "provider": t.provider, "provider_id": t.id, "price_hr": t.price_hr, "stray": False}
            row |= {"address": f"volume in {t.region}" if t.region else "volume", "doubt": "", "fate": fate}
            found.rows[t.provider, f"volume {t.id or t.name}"] = row | {"swept": False}
            if fate == ORPHAN:
                found.left.append(f"volume {t.name} is left behind: uvcc pods --sweep ends it")
            elif fate == KEPT:
                found.notes.append(f"volume {t.name} is kept and costs on; delete it at {t.provider}")


async def _prove(only: list[str], found: PodSurvey) -> None:
    """Look at every create of runs that are over or dead and that had no answer; a line for each that is not proven."""
    from uvcc_console.fleet.cloud.ends import LAG_S
    from uvcc_console.fleet.cloud.intents import Intents, unended
    from uvcc_console.fleet.failover.failover_choice import chosen
    from uvcc_console.fleet.provider import Rents
    from uvcc_console.fleet.provider_kinds import DEFAULT, provider_for, sections
    from uvcc_console.runs.sweep import KEPT, ORPHAN, fate_of

    for run_dir in common.run_dirs():
        fate = fate_of(f"{POD_PREFIX}{run_dir.name}-p0r0")
        tries = {t.name: t for t in [*Intents.of(run_dir).tries().values(), *unended(run_dir)] if t.open}
        given = common.read_snapshot(run_dir)[0].profile.get("fleet", {})
        fleet = dict(given) if isinstance(given, Mapping) else {}
        asked = {str(chosen(part, run_dir).get("provider", DEFAULT)) for part in sections(fleet)}
        if not tries or fate not in (ORPHAN, KEPT) or (only and not asked & set(only)):
            continue
        kept = [t.base for t in tries.values() if fate == KEPT and t.held]
        try:
            provider = provider_for(fleet, run_dir)
            try:
                left = await provider.prove(ended=True, keep=kept) if isinstance(provider, Rents) else []
            finally:
                await provider.close()
        except UvccError as e:
            found.unknown.append(f"{run_dir.name}: {e}")
            continue
        for name in left:
            until = time.strftime("%H:%M", time.localtime(tries[name].asked + LAG_S)) if name in tries else "later"
            if name in tries and tries[name].id:
                continue  # a volume that will not go is told of with the others
            what = f"{name} was never answered; not proven yet that nothing comes of it"
            found.unknown.append(f"{what}, look again at {until}: uvcc pods --sweep")


async def survey_pods(fleets: list[KnownFleet], sweep: bool, found: PodSurvey) -> None:
    for known in fleets:
        name, run = known.fleet["provider"], known.folder.name
        try:
            await _survey_one(known.fleet, known.folder, sweep, found)
        except ConfigError as e:  # a key that is missing, a file of hosts that is not there: time does not mend it
            if known.used:
                found.unknown.append(f"{name}, which {run} asked for pods: {e}")
            elif known.named:
                found.unknown.append(f"{name}: {e}")
            else:
                found.all_heard = False
                why = f"{name} was not looked at, and {run} had asked it for nothing: {e.what}"
                found.notes.append(f"{why}; uvcc runs --delete {run} forgets it")
        except UvccError as e:
            found.unknown.append(f"{name}: {e}")


async def _survey_one(fleet: dict[str, Any], folder: Path, sweep: bool, found: PodSurvey) -> None:
    from uvcc_console.fleet.provider import AsksHosts
    from uvcc_console.fleet.provider_kinds import provider_for
    from uvcc_console.runs.sweep import ORPHAN, UNREADABLE, fate_of

    provider = provider_for(fleet, folder)
    try:
        pods = [(pod, fate_of(pod.name)) for pod in await provider.list(POD_PREFIX)]
        lost = [pod for pod, fate in pods if sweep and fate == ORPHAN]
        # all at once: each costs money until it is gone, and one that will not go keeps no other
        ends = await asyncio.gather(*(provider.delete(pod) for pod in lost), return_exceptions=True)
        failed = {(pod.name, pod.provider_id): e for pod, e in zip(lost, ends, strict=True) if e is not None}
        for pod, fate in pods:
            error = failed.get((pod.name, pod.provider_id))
            if error is not None and not isinstance(error, UvccError):
                raise error
            swept = pod in lost and error is None
            row = {**asdict(pod), "address": pod.address, "fate": fate, "swept": swept}
            found.rows.setdefault((pod.provider, pod.provider_id or pod.name), row)
            _judge(pod, fate == UNREADABLE, str(fleet["provider"]), error, swept, found)
            if swept:
                _note_swept(pod.name)
        if isinstance(provider, AsksHosts):
            found.notes += [f"{e.what}; no run here asked for a claim on it" for e in provider.silent.values()]
    finally:
        await provider.close()


def _judge(pod: Pod, unreadable: bool, provider: str, error: UvccError | None, swept: bool, found: PodSurvey) -> None:
    """What is left behind, what nobody can tell, and what the operator does about it."""
    from uvcc_console.rollout.stages.fleet.provision import end_command

    if unreadable:
        what = f"pod {pod.name} is left alone: the journal of its run cannot be read"
        found.left.append(f"{what}; if nobody needs it, delete it at {provider}")
    elif error is not None:
        line = f"{pod.name} is not proven gone: {error}; then: {end_command(pod.name, error)}"
        (found.unknown if pod.doubt else found.left).append(line)
    elif pod.doubt and not swept:
        found.unknown.append(f"{pod.name} may be there, nobody can tell: {pod.doubt}")


def _note_swept(name: str) -> None:
    """A run that told of it as left behind does so no more."""
    from uvcc_console.runs.kept_pods import run_of

    run = run_of(name)
    if run and (paths.run_dir(run) / JOURNAL).exists():
        try:
            _note_gone(paths.run_dir(run), name)
        except UvccError as e:  # it is gone, whatever can be written about it
            common.say(f"uvcc: not written into the journal of {run}: {e}")
