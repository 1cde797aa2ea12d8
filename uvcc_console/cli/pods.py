"""``uvcc pods``: pods that exist at the providers; ``--sweep`` deletes those left behind by this data folder's runs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from uvcc_console.cli import common
from uvcc_console.cli.main import FAILED, OK
from uvcc_console.core import paths
from uvcc_engine.contract.errors import UvccError

PREFIX = "uvcc-"


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "pods",
        "Pods of ours that exist, and whose they are. A pod whose lease (halt.lease) nobody renews halts its workers, "
        "but a rented one costs money until it is deleted: the run's sidecar does that when the console is gone, also "
        "for kept pods whose limits.ttl is over; after a reboot of this machine the next rollout does, or --sweep.",
    )
    parser.add_argument("--sweep", action="store_true", help="delete those whose run here is over or dead, with proof")
    parser.add_argument("--provider", action="append", default=[], metavar="NAME", help="ask this provider (local)")
    parser.add_json()
    args = parser.parse_args(argv)
    rows, trouble = asyncio.run(_survey(_known_fleets(args.provider), args.sweep))
    if args.sweep:
        trouble += asyncio.run(_prove(args.provider))
    if args.json:
        common.emit(rows)
    else:
        for r in rows:
            fate = "swept" if r["swept"] else "one too many" if r["stray"] else r["fate"]
            common.show(f"{r['name']:<44} {r['provider']:<10} {r['price_hr']:>7.2f} $/h  {r['address']:<28} {fate}")
        if not rows:
            common.say("no pods")
    for line in trouble:
        common.say(f"uvcc: {line}")
    return FAILED if trouble else OK


def _known_fleets(only: list[str]) -> list[tuple[dict[str, Any], Path]]:
    """Every way to ask for pods that a run of this machine has used: its whole ``fleet`` mapping and its folder.

    ``local`` is always asked. One run stands for all that ask the same account, the same hosts with the same key.
    """
    found: dict[tuple[str, ...], tuple[dict[str, Any], Path]] = {("local",): ({"provider": "local"}, paths.data_dir())}
    for run_dir in common.run_dirs():
        s, why = common.read_snapshot(run_dir)
        if why:
            common.say(f"uvcc: {run_dir.name} is unreadable, its pods are not judged: {why}")
        given = s.profile.get("fleet", {})
        fleet = dict(given) if isinstance(given, Mapping) else {}
        name = str(fleet.get("provider", "local"))
        if name != "local":
            found[name, *(str(fleet.get(k, "")) for k in ("base_url", "hosts", "ssh_key"))] = (fleet, run_dir)
    known = {key[0] for key in found}
    for name in only:
        if name not in known:
            found[(name,)] = ({"provider": name}, paths.data_dir())
    return [found[key] for key in sorted(found) if not only or key[0] in only]


async def _prove(only: list[str]) -> list[str]:
    """Look at every create of runs that are over or dead and that had no answer; a line for each that is not proven."""
    from uvcc_console.fleet.prime.intents import Intents
    from uvcc_console.fleet.provider import Rents, provider_for
    from uvcc_console.runs.sweep import KEPT, ORPHAN, fate_of

    lines = []
    for run_dir in common.run_dirs():
        fate = fate_of(f"{PREFIX}{run_dir.name}-p0r0")
        tries = [t for t in Intents.of(run_dir).tries().values() if t.open]
        given = common.read_snapshot(run_dir)[0].profile.get("fleet", {})
        fleet = dict(given) if isinstance(given, Mapping) else {}
        if not tries or fate not in (ORPHAN, KEPT) or (only and fleet.get("provider") not in only):
            continue
        try:
            provider = provider_for(fleet, run_dir)
            try:
                if isinstance(provider, Rents):
                    left = await provider.prove(ended=True, keep=[t.base for t in tries if fate == KEPT and t.held])
                    lines += [f"{name} was never answered; not proven yet that no pod comes of it" for name in left]
            finally:
                await provider.close()
        except UvccError as e:
            lines.append(f"{run_dir.name}: {e}")
    return lines


async def _survey(fleets: list[tuple[dict[str, Any], Path]], sweep: bool) -> tuple[list[dict[str, Any]], list[str]]:
    from uvcc_console.fleet.provider import provider_for
    from uvcc_console.runs.sweep import ORPHAN, UNREADABLE, fate_of

    rows: dict[tuple[str, str], dict[str, Any]] = {}
    trouble: list[str] = []
    for fleet, folder in fleets:
        try:
            provider = provider_for(fleet, folder)
            try:
                found = [(pod, fate_of(pod.name)) for pod in await provider.list(PREFIX)]
                lost = [pod for pod, fate in found if sweep and fate == ORPHAN]
                # all at once: each costs money until it is gone, and one that will not go keeps no other
                ends = await asyncio.gather(*(provider.delete(pod) for pod in lost), return_exceptions=True)
                failed = {pod.name: e for pod, e in zip(lost, ends, strict=True) if isinstance(e, BaseException)}
                for pod, fate in found:
                    swept = pod in lost and pod.name not in failed
                    row = {**asdict(pod), "address": pod.address, "fate": fate, "swept": swept}
                    if fate == UNREADABLE:
                        what = f"pod {pod.name} is left alone: the journal of its run cannot be read"
                        trouble.append(f"{what}; if nobody needs it, delete it at {fleet['provider']}")
                    rows.setdefault((pod.provider, pod.provider_id or pod.name), row)
                trouble += [f"{fleet['provider']}: {e}" for e in failed.values() if isinstance(e, UvccError)]
                for e in failed.values():
                    if not isinstance(e, UvccError):
                        raise e
            finally:
                await provider.close()
        except UvccError as e:
            trouble.append(f"{fleet['provider']}: {e}")
    return list(rows.values()), trouble
