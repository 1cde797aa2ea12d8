"""A snapshot kept beside the journal, so that a reader need not fold a day of events: it folds what came after.

It is a view like any other: whoever finds none, an older one, or one of another journal, reads the journal
from its beginning. Curves are thinned to a bounded number of points, their first and last among them. A summary lies
beside it, a few kilobytes for whoever asks about many runs at once: no curves, no log, no heartbeats.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from uvcc_console.core import events, paged, series, snapshot, words
from uvcc_console.core.events import event_base, reported
from uvcc_console.core.folding import (
    bad_records,
    bulk_folding,
    measures,
    pairs,
    reducing,
    reported_state,
    state,
    vitals,
)
from uvcc_console.core.series import Series
from uvcc_console.core.snapshot import Snapshot
from uvcc_engine.contract.run_files import event_names
from uvcc_engine.contract.run_files.files import discard

NAME: Final = "snapshot.json"
SUMMARY: Final = "summary.json"
POINTS: Final = 200_000  # of all curves together
LEAST_POINTS: Final = 64  # of one curve
_LARGEST: Final = 64 << 20
_FOLDING: Final = (
    event_names,
    event_base,
    events,
    reported,
    reducing,
    reported_state,
    state,
    bulk_folding,
    measures,
    paged,
    pairs,
    bad_records,
    series,
    snapshot,
    vitals,
    words,
)
_CLASSES: Final[Mapping[str, type[Any]]] = {
    name: c for name, c in vars(snapshot).items() if isinstance(c, type) and dataclasses.is_dataclass(c)
}


@cache
def version() -> str:
    """Of the code that folds and keeps: a snapshot that another version folded is not read."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for module in _FOLDING:
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()


def keep(run_dir: Path, s: Snapshot, mark: str) -> None:
    """Write a run's summary, then its snapshot, each whole or not at all; ``mark`` tells its journal from others.

    Raises OSError.
    """
    keep_summary(run_dir, s, mark)
    points = max(LEAST_POINTS, POINTS // max(1, sum(len(by_name) for by_name in s.series.values())))
    _write(run_dir, NAME, s, mark, points)


def keep_summary(run_dir: Path, s: Snapshot, mark: str) -> None:
    """Write a run's summary alone. Raises OSError."""
    _write(run_dir, SUMMARY, summary(s), mark, 1)


def summary(s: Snapshot) -> Snapshot:
    """The snapshot without what only a picture of the run needs. Folding may go on from it."""
    return dataclasses.replace(
        s,
        pods=MappingProxyType({name: _without_curves(p) for name, p in s.pods.items()}),
        workers=MappingProxyType({c: snapshot.WorkerView(c, pod=w.pod, step=w.step) for c, w in s.workers.items()}),
        series=_last_of(s, "loss"),
        agreement=(),
        alerts=(),
        log=(),
        facts=snapshot.EMPTY,
        triage=(),
        flight=None,
        waits=snapshot.EMPTY,
        pairs=snapshot.EMPTY,
        malformed=snapshot.EMPTY,
        odd=(),
    )


def _without_curves(p: snapshot.PodView) -> snapshot.PodView:
    return dataclasses.replace(p, disk=Series(), cpu=Series(), memory=Series(), gpu=Series(), gpus=())


def _last_of(s: Snapshot, name: str) -> Mapping[str, Mapping[str, Series]]:
    """The newest point of a figure over all workers, as a curve of one point."""
    found = {c: line.last for c, by_name in s.series.items() if (line := by_name.get(name)) and line.last}
    if not found:
        return MappingProxyType({})
    coord = max(found, key=lambda c: found[c][0])
    return MappingProxyType({coord: MappingProxyType({name: Series().append(*found[coord])})})


def _write(run_dir: Path, name: str, s: Snapshot, mark: str, points: int) -> None:
    body = {"version": version(), "seq": s.seq, "mark": mark, "snapshot": as_plain(s, points)}
    partial = run_dir / f".{name}.{os.getpid()}"
    try:
        partial.write_text(json.dumps(body, separators=(",", ":")))
        partial.replace(run_dir / name)
    except OSError:
        discard(partial)
        raise


def load(run_dir: Path, mark_at: Callable[[int], str], name: str = NAME) -> Snapshot | None:
    """The kept snapshot, or the summary; None if there is none that this code and this journal can go on from.

    ``mark_at(seq)`` is the journal's own mark at that row, empty if it has no such row.
    """
    path = run_dir / name
    try:
        if path.stat().st_size > _LARGEST:
            return None
        body = json.loads(path.read_bytes())
        if body["version"] != version() or not body["mark"] or mark_at(int(body["seq"])) != body["mark"]:
            return None
        found = from_plain(body["snapshot"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return found if isinstance(found, Snapshot) and found.seq == body["seq"] else None


def as_plain(value: Any, points: int) -> Any:
    """A snapshot, or a part of one, as JSON can hold it; of each series at most about ``points`` points."""
    if isinstance(value, Series):
        xs, ys = _thinned(value, points)
        return {"~": "series", "x": _packed(xs), "y": _packed(ys)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: as_plain(getattr(value, f.name), points) for f in dataclasses.fields(value)}
        return {"~": type(value).__name__, **fields}
    if isinstance(value, Mapping):
        kind = "dict" if isinstance(value, dict) else "map"  # a profile's sections are read as what they were
        return {"~": kind, "k": list(value), "v": [as_plain(v, points) for v in value.values()]}
    if isinstance(value, tuple):
        return {"~": "tuple", "v": [as_plain(v, points) for v in value]}
    if isinstance(value, list):
        return [as_plain(v, points) for v in value]
    return value


def from_plain(value: Any) -> Any:
    """The inverse of :func:`as_plain`. Raises KeyError, TypeError or ValueError for what that never made."""
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    if not isinstance(value, dict):
        return value
    kind = value["~"]
    if kind == "series":
        xs, ys = _unpacked(value["x"]), _unpacked(value["y"])
        return Series(xs, ys, len(xs))
    if kind in ("map", "dict"):
        found = dict(zip(value["k"], map(from_plain, value["v"]), strict=True))
        return found if kind == "dict" else MappingProxyType(found)
    if kind == "tuple":
        return tuple(map(from_plain, value["v"]))
    return _CLASSES[kind](**{k: from_plain(v) for k, v in value.items() if k != "~"})


def _thinned(line: Series, points: int) -> tuple[array[float], array[float]]:
    xs, ys = line.xs(), line.ys()
    if len(xs) <= points:
        return xs, ys
    stride = -(-len(xs) // (points - 1))
    last = len(xs) - 1
    keep_at = [*range(0, last, stride), last]
    return array("d", (xs[i] for i in keep_at)), array("d", (ys[i] for i in keep_at))


def _packed(numbers: array[float]) -> str:
    return base64.b64encode(numbers.tobytes()).decode()


def _unpacked(text: str) -> array[float]:
    found: array[float] = array("d")
    found.frombytes(base64.b64decode(text, validate=True))
    return found
