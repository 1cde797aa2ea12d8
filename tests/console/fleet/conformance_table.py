"""The conformance suite as a table, scenario by vendor: ``python tests/console/fleet/conformance_table.py``.

Every cell is played here and now; a cell that cannot happen at a vendor says why below. Exits 1 where one failed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from cloudworld import NEVER, RUN, WITH_VOLUMES, Vendors, cloud_world
from test_conformance import ALL, VOLUMES

NO_VOLUMES = "no volumes are made there"


async def _play(name: str, vendor: str, home: Path) -> str:
    """What came of it; "ok" for a scenario that holds."""
    os.environ["UVCC_HOME"] = str(home)
    folder = home / "runs" / RUN.removeprefix("uvcc-")
    folder.mkdir(parents=True)
    try:
        async with asyncio.timeout(120), cloud_world(vendor, folder) as world:
            await (ALL | VOLUMES)[name](world)
            await world.down()
            return "ok" if world.fake.billing == [] else "it still bills"
    except Exception as e:  # noqa: BLE001  (a cell of the table, whatever it is)
        return f"{type(e).__name__}: {e}"[:200]
    except BaseException as e:
        if type(e).__name__ != "Failed":  # pytest's own, for what did not raise
            raise
        return str(e)


def main() -> int:
    logging.disable(logging.CRITICAL)
    wanted = sys.argv[1:] or list(Vendors)
    print(f"| scenario | {' | '.join(wanted)} |\n|---|{'---|' * len(wanted)}")
    failed: list[str] = []
    never = NEVER | {(n, v): NO_VOLUMES for n in VOLUMES for v in Vendors if v not in WITH_VOLUMES}
    for name in ALL | VOLUMES:
        cells = []
        for vendor in wanted:
            if (name, vendor) in never:
                cells.append("n/a")
                continue
            with tempfile.TemporaryDirectory() as home:
                came = asyncio.run(_play(name, vendor, Path(home)))
            cells.append("ok" if came == "ok" else "FAILED")
            failed += [f"{name}, {vendor}: {came}"] if came != "ok" else []
        print(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |", flush=True)
    print("\nn/a: " + "; ".join(f"{n.replace('_', ' ')} ({v}: {why})" for (n, v), why in NEVER.items() if v in wanted))
    print(f"{NO_VOLUMES}: {', '.join(v for v in wanted if v not in WITH_VOLUMES)}")
    print(f"\n{len(ALL | VOLUMES)} scenarios, {len(failed)} failed", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
