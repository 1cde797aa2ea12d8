"""``uvcc pods``: pods of ours that exist at the providers; ``--sweep`` deletes those that no live run owns."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

from uvcc_console.cli import common
from uvcc_console.cli.main import FAILED, OK
from uvcc_console.core import paths
from uvcc_engine.contract.errors import UvccError

PREFIX = "uvcc-"


def run(argv: list[str]) -> int:
    parser = common.Parser("pods", "Pods of ours that exist, and whose they are.")
    parser.add_argument("--sweep", action="store_true", help="delete those that no live run owns, with proof")
    parser.add_argument("--provider", action="append", default=[], metavar="NAME", help="ask this provider (local)")
    parser.add_json()
    args = parser.parse_args(argv)
    rows, trouble = asyncio.run(_survey(args.provider or _known_providers(), args.sweep))
    if args.json:
        common.emit(rows)
    else:
        for r in rows:
            fate = "swept" if r["swept"] else "live run" if r["owned"] else "ORPHAN"
            print(f"{r['name']:<44} {r['provider']:<10} {r['price_hr']:>7.2f} $/h  {r['address']:<28} {fate}")
        if not rows:
            common.say("no pods")
    for line in trouble:
        common.say(f"uvcc: {line}")
    return FAILED if trouble else OK


def _known_providers() -> list[str]:
    """``local`` and every provider that a run of this machine has used."""
    found = {"local"}
    for run_dir in common.run_dirs():
        fleet = common.load_snapshot(run_dir).profile.get("fleet", {})
        found.add(str(fleet.get("provider", "local")))
    return sorted(found)


def _owner(name: str) -> Path | None:
    """The live run that a pod belongs to, told by its name ``uvcc-RUN-p0r0``."""
    from uvcc_console.rollout.spawn import CONDUCTOR, running

    run_dir = paths.run_dir(name.removeprefix(PREFIX).rpartition("-")[0])
    return run_dir if running(run_dir, CONDUCTOR) else None


async def _survey(providers: list[str], sweep: bool) -> tuple[list[dict[str, Any]], list[str]]:
    from uvcc_console.fleet.provider import provider_for

    rows: list[dict[str, Any]] = []
    trouble: list[str] = []
    for name in providers:
        try:
            provider = provider_for({"provider": name}, paths.data_dir())
            try:
                for pod in await provider.list(PREFIX):
                    owned, swept = _owner(pod.name) is not None, False
                    if sweep and not owned:
                        await provider.delete(pod)
                        swept = True
                    rows.append({**asdict(pod), "address": pod.address, "owned": owned, "swept": swept})
            finally:
                await provider.close()
        except UvccError as e:
            trouble.append(f"{name}: {e}")
    return rows, trouble
