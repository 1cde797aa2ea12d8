"""What the console is about to create, on disk before the provider hears of it. Survives ``kill -9``.

Every try at a pod is one name, and what became of it is told here: answered (its id), held by the run, refused, proven
gone, or proven never to have been. Which pods are a run's own, and which of them it holds, is read from here: by ids.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from uvcc_console.fleet.provider import POD_PREFIX, Books
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.contract.run_files.files import append_synced

FILE = "intents.jsonl"
VOLUMES_FILE = "volumes.jsonl"
_EARLIER = "prime_intents.jsonl"  # what runs of before 0.1 called it
_NAME = re.compile(r"(?P<base>.+-p\d{1,4}r\d{1,4})x[0-9a-z]{6}")
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_ENDS = ("refused", "absent", "gone")


def attempt_name(base: str) -> str:
    """A name never used before for one more try at pod ``base``; it still says whose it is."""
    return f"{base}x{''.join(secrets.choice(_ALPHABET) for _ in range(6))}"


def base_of(name: str) -> str:
    """The pod that an attempt was for: ``uvcc-RUN-p0r1xk3f9a2`` -> ``uvcc-RUN-p0r1``; "" for a name not of ours."""
    found = _NAME.fullmatch(name)
    return found["base"] if found and name.startswith(POD_PREFIX) else ""


@dataclass(frozen=True, slots=True)
class Try:
    """One create and what became of it. Times are the run's; prices US dollars an hour.

    ``outcome``: "" (it may have a pod), refused, absent (proven never to have been) or gone (proven gone). ``held``:
    the run uses this pod. ``rejected``: it is not what was asked for. ``seen``: the market has shown it. ``billed``:
    US dollars by the provider's books. ``spot``: it may be taken away. ``ending``: we asked for its end; ``taken``: it
    ended without that, and ``how`` is what the provider says of it. ``rises``: from when it cost how much more an hour
    than before, of prices told after the create's answer; ``price_hr`` is with them. ``region``: where a volume lies;
    ``kept``: it stays after the run, if a pod had it. ``given``: the run did not make it, and never ends it; ``mount``:
    where its pod has it.
    """

    name: str
    asked: float
    heard: float
    id: str = ""
    user: str = ""
    provider: str = ""
    price_hr: float = 0.0
    rises: tuple[tuple[float, float], ...] = ()
    seen: float = 0.0
    held: bool = False
    rejected: bool = False
    outcome: str = ""
    ended: float = 0.0
    billed: float | None = None
    spot: bool = False
    ending: bool = False
    taken: bool = False
    how: str = ""
    region: str = ""
    kept: bool = False
    given: bool = False
    mount: str = ""

    @property
    def base(self) -> str:
        return base_of(self.name)

    @property
    def open(self) -> bool:
        """Whether this pod may still cost something."""
        return not self.outcome

    @property
    def answered(self) -> bool:
        """The market has given it an id."""
        return bool(self.id)

    def cost(self, now: float) -> float:
        """US dollars until now, by our clock: from the asking on, and nothing for what never was.

        What it cost at the time counts: a price that has risen says nothing of the hours before.
        """
        if self.outcome in ("refused", "absent"):
            return 0.0
        end = now if self.open else self.ended
        steps = ((self.asked, self.first_hr), *self.rises)
        return sum(more * max(0.0, end - since) for since, more in steps) / 3600.0

    @property
    def first_hr(self) -> float:
        """US dollars an hour when it was taken."""
        return self.price_hr - sum(more for _, more in self.rises)


@dataclass(frozen=True, slots=True)
class Intents:
    """Append-only, fsynced. Lines: {ts, name, offer} before a create, then {ts, name, id | refused | absent | gone}."""

    path: Path

    @classmethod
    def of(cls, run_dir: Path) -> Intents:
        earlier = run_dir / _EARLIER
        return cls(earlier if earlier.exists() else run_dir / FILE)

    def note(self, ts: float, **fields: object) -> None:
        """Raises UvccError if the disk refuses; then nothing may be created."""
        row = {"ts": round(ts, 3), **fields}
        append_synced(self.path, row, "free disk space; no pod was created")

    def tries(self, prefix: str = "") -> dict[str, Try]:
        """Every try at a pod whose name starts so, by its name.

        A line cut short by a crash is no intent: it was not yet synced, so nothing was sent.
        """
        try:
            lines = self.path.read_text(errors="replace").splitlines()
        except OSError:
            return {}
        found: dict[str, Try] = {}
        for line in lines:
            try:
                row = json_of(line)
                name, ts = str(row["name"]), float(row["ts"])
            except (ValueError, KeyError, TypeError):
                continue
            if name.startswith(prefix) and math.isfinite(ts):
                found[name] = _fold(found.get(name) or Try(name, ts, ts), row, ts)
        return found

    def open(self, prefix: str) -> dict[str, float]:
        """Names that may have a pod, and when they were last heard of: not refused, not given up, not proven gone."""
        return {name: t.heard for name, t in self.tries(prefix).items() if t.open}


def unended(run_dir: Path) -> list[Try]:
    """Volumes of a run that may still be there and shall not stay: not those that the profile keeps."""
    tries = Intents(run_dir / VOLUMES_FILE).tries().values()
    return [t for t in tries if t.open and not t.given and not (t.kept and t.held)]


def mount_of(run_dir: Path, base: str) -> str:
    """Where the pod of this name has its volume, as its vendor told; "" where it is not written down."""
    found = [t for t in Intents(run_dir / VOLUMES_FILE).tries(base).values() if t.open and t.held and t.base == base]
    return max(found, key=lambda t: t.heard).mount if found else ""


def _fold(t: Try, row: Mapping[str, Any], ts: float) -> Try:
    pod_id = str(row.get("id") or "")
    if pod_id and t.id and pod_id != t.id:
        return t  # the market obeyed twice: the second pod is told of under the same name, and ends by itself
    outcome = next((word for word in _ENDS if row.get(word)), t.outcome)
    told = _number(row.get("price_hr"))
    more = max(0.0, told - t.price_hr)
    return replace(
        t,
        heard=ts,
        id=pod_id or t.id,
        user=str(row.get("user") or "") or t.user,
        provider=str(row.get("provider") or "") or t.provider,
        price_hr=t.price_hr + more,  # one that falls is not believed: the bill decides
        rises=(*t.rises, (ts, more)) if more and t.id and t.price_hr and not t.outcome else t.rises,
        seen=t.seen or (ts if row.get("seen") else 0.0),
        held=(t.held or bool(row.get("held"))) and not row.get("released"),
        rejected=t.rejected or bool(row.get("rejected")),
        billed=_number(row["billed"]) if row.get("billed") is not None else t.billed,
        spot=t.spot or bool(row.get("spot")),
        ending=t.ending or bool(row.get("ending")),
        taken=t.taken or (bool(row.get("taken")) and not t.ending),
        how=t.how or str(row.get("how") or ""),
        kept=t.kept or bool(row.get("kept")),
        region=t.region or str(row.get("region") or ""),
        given=t.given or bool(row.get("given")),
        mount=str(row.get("mount") or "") or t.mount,
        outcome=outcome,
        ended=ts if outcome and not t.outcome else t.ended,
    )


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return 0.0
    return min(number, MOST) if math.isfinite(number) and number > 0 else 0.0


MOST: Final = 1e9  # US dollars, or those an hour: whatever is said to be more, sums of it stay numbers
BILL_SHARE, BILL_SLACK = 1.10, 0.02


def books_of(tries: Iterable[Try], now: float) -> Books:
    """Our own account of these tries, held against the provider's bill where it is known."""
    spent, hourly = 0.0, 0.0
    over = []
    for t in tries:
        ours = t.cost(now)
        spent += max(ours, t.billed or 0.0)
        hourly += t.price_hr if t.open else 0.0
        if t.billed is not None and t.billed > ours * BILL_SHARE + BILL_SLACK:
            over.append((t.name, ours, t.billed))
    return Books(spent, hourly, tuple(over))


def run_books(run_dir: Path, now: float) -> Books:
    """What a run has rented, pods and their volumes, and which of the pods that it holds cost more than at first.

    A volume that the profile names costs its owner, whether the run is there or not.
    """
    pods = list(Intents.of(run_dir).tries().values())
    volumes = [t for t in Intents(run_dir / VOLUMES_FILE).tries().values() if not t.given]
    dearer = tuple((t.base, t.first_hr, t.price_hr) for t in pods if t.open and t.held and t.rises)
    known = frozenset(t.base.rpartition("-")[2] for t in pods)
    return replace(books_of([*pods, *volumes], now), dearer=dearer, pods=known if pods else None)
