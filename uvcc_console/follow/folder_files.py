"""What the names and documents of a followed folder mean: which file is what, of which run, of which worker. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from uvcc_console.follow import listing
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.parsing.untrusted import STEPS, as_int, as_object
from uvcc_engine.contract.run_files import files


def reading_order(name: str) -> tuple[int, str]:
    """What a run is comes first, how it ended last."""
    base = name.rpartition("/")[2]
    rank = 0 if base == files.RUN_JSON else 3 if files.is_exit(base) else 2 if files.is_result(base) else 1
    return rank, name


def of_contract(name: str) -> bool:
    """Whether a file has a name of the run contract, at the top of the folder."""
    return name in listing.CONTRACT or ("/" not in name and matches_any(name, listing.RANKS))


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Whether a file's last name is of one of these patterns."""
    return any(fnmatchcase(name.rpartition("/")[2], pattern) for pattern in patterns)


def label_of(name: str) -> str:
    """What stands before a figure that another file has as well: an event file's folder, a table's own name."""
    folder, _, base = name.rpartition("/")
    if base.startswith("events.out."):
        return folder.rpartition("/")[2] or "tb"
    return base.rpartition(".")[0]


def run_id_of(found: object) -> str:
    """A run's id; "" for whatever is none."""
    try:
        return files.checked_run_id(found) if isinstance(found, str) else ""
    except ConfigError:
        return ""


def coord_of(found: object) -> Coord | None:
    """A worker's coordinate; None for whatever is none."""
    try:
        return Coord.parse(found) if isinstance(found, str) else None
    except ConfigError:
        return None


def steps_of(read: Mapping[str, Any]) -> int:
    """How many steps a run says that it will make, at the top of its facts or below; 0 where it does not."""
    parts = [read, *(v for v in read.values() if isinstance(v, Mapping))]
    parts += [v for p in parts[1:] for v in p.values() if isinstance(v, Mapping)]
    return next((n for p in parts if (n := as_int(p.get("steps"), 1, STEPS))), 0)


def with_coord(line: str, coord: str) -> str:
    """A heartbeat that names no worker, named by its file."""
    read = as_object(line)
    if read is None or coord_of(read.get("coord")) is not None:
        return line
    return json.dumps(read | {"coord": coord})
