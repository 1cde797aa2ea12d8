"""What flight recorders tell when they are laid side by side: who is behind in which communicator, and who differs.

Pure. An answer is one worker's ``flight_<coord>.json``: ``tables.sequence`` are the operations that the trainer
numbered itself, ``tables.collectives`` those of torch's own recorder. Members of a communicator number alike, so these
can be compared; answers are not of one moment, so nobody is called behind while the numbers still move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

TABLES: Final = ("sequence", "collectives")
STILL_S: Final = 3.0  # younger than this, and the newest collective may just be another one
_PAIRWISE: Final = ("send", "receive", "recv", "gloo:send", "gloo:recv", "nccl:send", "nccl:recv")

Answers = Mapping[str, Mapping[str, Any]]
Entry = Mapping[str, Any]


def entries(answer: Mapping[str, Any], table: str) -> list[Entry]:
    """A table of an answer, oldest first; empty where the worker has none, or could not read it."""
    found = (answer.get("tables") or {}).get(table)
    return [e for e in found if isinstance(e, Mapping)] if isinstance(found, Sequence) else []


def newest(answer: Mapping[str, Any]) -> str:
    """A worker's newest collective in words, with its age; else whom it waits for."""
    all_of_them = [e for table in TABLES for e in entries(answer, table)]
    last = max(all_of_them, key=lambda e: float(e.get("ts", 0.0)), default=None)
    if last is None:
        return f"waits for {answer['waiting_on']}" if answer.get("waiting_on") else "no collective yet"
    age = max(0.0, float(answer.get("ts", 0.0)) - float(last.get("ts", 0.0)))
    return f"{_name(last)} #{last.get('seq')} {last.get('op')}, {last.get('state')}, {age:.1f} s old"


def judge(answers: Answers) -> list[str]:
    """What is wrong, the trainer's own numbers before torch's; empty where all agree or still move."""
    found: list[str] = []
    for table in TABLES:
        for group, by_coord in _groups(answers, table).items():
            found += [f"{group}: {text}" for text in _compare(by_coord, answers)]
    return found


def _groups(answers: Answers, table: str) -> dict[str, dict[str, list[Entry]]]:
    """Communicator -> worker -> its collectives. Those with traffic between two members are left out: it differs."""
    found: dict[str, dict[str, list[Entry]]] = {}
    pairwise: set[str] = set()
    for coord, answer in sorted(answers.items()):
        for entry in entries(answer, table):
            key = f"{coord[:2]} {_name(entry)}"
            found.setdefault(key, {}).setdefault(coord, []).append(entry)
            if str(entry.get("op", "")).startswith(_PAIRWISE):
                pairwise.add(key)
    return {k: v for k, v in found.items() if len(v) > 1 and k not in pairwise}


def _name(entry: Entry) -> str:
    group, about = str(entry.get("group", "")), str(entry.get("about", ""))
    return f"{about} {group}" if about and about != group else group


def _compare(by_coord: Mapping[str, Sequence[Entry]], answers: Answers) -> Iterator[str]:
    different = _first_difference(by_coord)
    if different:
        yield different
        return
    ages = [float(answers[c].get("ts", 0.0)) - float(es[-1].get("ts", 0.0)) for c, es in by_coord.items()]
    if min(ages) < STILL_S:
        return
    last = {c: es[-1] for c, es in by_coord.items()}
    front = max(int(e.get("seq", -1)) for e in last.values())
    at = next(e for e in last.values() if int(e.get("seq", -1)) == front)
    behind = [c for c, e in last.items() if int(e.get("seq", -1)) < front]
    if behind:
        where = ", ".join(f"{c} is at #{last[c].get('seq')} {last[c].get('op')}" for c in behind)
        yield f"nothing moved for {min(ages):.0f} s; {where}, the others at #{front} {at.get('op')}"


def _first_difference(by_coord: Mapping[str, Sequence[Entry]]) -> str:
    """The first number under which one worker called something else than most of the others."""
    called: dict[int, dict[str, tuple[str, str]]] = {}
    for coord, es in by_coord.items():
        for e in es:
            called.setdefault(int(e.get("seq", -1)), {})[coord] = (str(e.get("op")), str(e.get("sizes", "")))
    for seq in sorted(called):
        usual = Counter(called[seq].values()).most_common(1)[0][0]
        for coord, what in sorted(called[seq].items()):
            if what != usual and len(called[seq]) > 1:
                return f"{coord} called {' '.join(what).strip()} as #{seq}, the others {' '.join(usual).strip()}"
    return ""
