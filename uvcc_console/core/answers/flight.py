"""What flight recorders tell when they are laid side by side: who is behind in which communicator, and who differs.

Pure. An answer is one worker's ``flight_<coord>.json``: ``tables.sequence`` are the operations that the trainer
numbered itself, ``tables.collectives`` those of torch's own recorder. Members of a communicator number alike, so these
can be compared; answers are not of one moment, so nobody is called behind while the numbers still move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from uvcc_engine.contract.parsing.untrusted import as_int, as_timestamp, scalar_text
from uvcc_engine.contract.run_files.waiting import Waiting
from uvcc_engine.contract.text import clean

TABLES: Final = ("sequence", "collectives")
STILL_S: Final = 3.0  # younger than this, and the newest collective may just be another one
_PAIRWISE: Final = ("send", "receive", "recv", "gloo:send", "gloo:recv", "nccl:send", "nccl:recv")

Answers = Mapping[str, Mapping[str, Any]]
Entry = Mapping[str, Any]


def entries(answer: Mapping[str, Any], table: str) -> list[Entry]:
    """A table of an answer, oldest first; empty where the worker has none, or could not read it."""
    tables = answer.get("tables")
    found = tables.get(table) if isinstance(tables, Mapping) else None
    return [e for e in found if isinstance(e, Mapping)] if isinstance(found, list | tuple) else []


def _ts(entry: Mapping[str, Any]) -> float:
    return as_timestamp(entry.get("ts")) or 0.0


def _seq(entry: Entry) -> int:
    found = as_int(entry.get("seq"))
    return -1 if found is None else found


def _op(entry: Entry) -> str:
    return scalar_text(entry.get("op"), 64)


def newest(answer: Mapping[str, Any]) -> str:
    """A worker's newest collective in words, with its age; else whom it waits for."""
    all_of_them = [e for table in TABLES for e in entries(answer, table)]
    last = max(all_of_them, key=_ts, default=None)
    if last is None:
        waiting = Waiting.of(answer)
        return f"waits for {waiting}" if waiting is not None else "no collective yet"
    age = max(0.0, _ts(answer) - _ts(last))
    return f"{_name(last)} #{_seq(last)} {_op(last)}, {scalar_text(last.get('state'), 32)}, {age:.1f} s old"


def diagnose(answers: Answers) -> list[str]:
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
            if _op(entry).startswith(_PAIRWISE):
                pairwise.add(key)
    return {k: v for k, v in found.items() if len(v) > 1 and k not in pairwise}


def _sizes(entry: Entry) -> str:
    try:
        return clean(str(entry.get("sizes", "")), 256)
    except (ValueError, RecursionError):  # a number of thousands of digits, a list within a list within a list
        return "?"


def _name(entry: Entry) -> str:
    group, about = scalar_text(entry.get("group"), 64), scalar_text(entry.get("about"), 64)
    return f"{about} {group}" if about and about != group else group


def _compare(by_coord: Mapping[str, Sequence[Entry]], answers: Answers) -> Iterator[str]:
    different = _first_difference(by_coord)
    if different:
        yield different
        return
    ages = [_ts(answers[c]) - _ts(es[-1]) for c, es in by_coord.items()]
    if min(ages) < STILL_S:
        return
    last = {c: es[-1] for c, es in by_coord.items()}
    front = max(_seq(e) for e in last.values())
    at = next(e for e in last.values() if _seq(e) == front)
    behind = [c for c, e in last.items() if _seq(e) < front]
    if behind:
        where = ", ".join(f"{c} is at #{_seq(last[c])} {_op(last[c])}" for c in behind)
        yield f"nothing moved for {min(ages):.0f} s; {where}, the others at #{front} {_op(at)}"


def _first_difference(by_coord: Mapping[str, Sequence[Entry]]) -> str:
    """The first number under which one worker called something else than most of the others."""
    called: dict[int, dict[str, tuple[str, str]]] = {}
    for coord, es in by_coord.items():
        for e in es:
            called.setdefault(_seq(e), {})[coord] = (_op(e), _sizes(e))
    for seq in sorted(called):
        usual = Counter(called[seq].values()).most_common(1)[0][0]
        for coord, what in sorted(called[seq].items()):
            if what != usual and len(called[seq]) > 1:
                return f"{coord} called {' '.join(what).strip()} as #{seq}, the others {' '.join(usual).strip()}"
    return ""
