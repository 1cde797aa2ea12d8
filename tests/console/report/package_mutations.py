"""Ways to falsify a finished run's package: any of its files, as bytes, lines, values, names; seeded."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uvcc_console.report.verify import run_verify

SEMANTIC = {"accuracy", "loss", "root", "step", "steps", "epoch", "epochs", "provider", "region", "pod_id", "ssh_host"}
Change = tuple[str, Callable[[], None], Callable[[], None]]


@dataclass
class Mutations:
    """Falsifies the package at ``root`` over and over; ``args`` is how it is verified, with exit code 0 if genuine."""

    root: Path
    args: list[str]
    rng: random.Random
    tried: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0

    def __post_init__(self) -> None:
        self.files = {p: p.read_bytes() for p in sorted(self.root.rglob("*")) if p.is_file()}
        assert self.verdict() == (0, "")

    def verdict(self) -> tuple[int, str]:
        """Exit code and diagnostics. Whatever is raised fails the test."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run_verify(self.args)
        return code, err.getvalue()

    def run(self, count: int) -> None:
        """Try so many; each must be refused, or not count as verified, with one line that says why."""
        changes = self.changes()
        while sum(self.tried.values()) < count:
            name, do, undo = next(changes)
            do()
            began = time.process_time()
            try:
                code, said = self.verdict()
            finally:
                undo()
            self.slowest = max(self.slowest, time.process_time() - began)
            assert code != 0, f"accepted: {name}"
            assert code in (1, 2, 3, 4, 5, 6), (name, code)
            assert "Traceback" not in said, name
            assert not said or said.rstrip("\n").isprintable(), (name, said)
            self.tried[name.partition(" ")[0]] += 1
        assert self.verdict() == (0, "")

    def changes(self) -> Iterator[Change]:
        makers = (self.of_bytes, self.of_lines, self.of_values, self.of_names, self.of_siblings)
        while True:
            path = self.rng.choice(list(self.files))
            change = self.rng.choice(makers)(path, self.files[path])
            if change is not None:
                yield change

    def written(self, name: str, path: Path, data: bytes) -> Change | None:
        before = self.files[path]
        if data == before:
            return None
        where = path.relative_to(self.root)
        return f"{name} {where}", lambda: _write(path, data), lambda: _write(path, before)

    def of_bytes(self, path: Path, data: bytes) -> Change | None:
        rng, found = self.rng, bytearray(data)
        at = rng.randrange(len(found) + 1)
        how = rng.choice(["flip", "cut", "drop", "insert", "append", "empty"])
        if how == "flip" and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif how == "cut":
            del found[at:]
        elif how == "drop":
            del found[at : at + rng.randrange(1, 70)]
        elif how == "insert":
            found[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif how == "append":
            found += rng.choice([b"\n", b"\0", data[-60:], b" "])
        else:
            found.clear()
        return self.written(how, path, bytes(found))

    def of_lines(self, path: Path, data: bytes) -> Change | None:
        lines, rng = data.splitlines(keepends=True), self.rng
        if len(lines) < 2:
            return None
        at, to = rng.randrange(len(lines)), rng.randrange(len(lines))
        how = rng.choice(["line-dropped", "line-doubled", "lines-swapped", "lines-reversed"])
        if how == "line-dropped":
            del lines[at]
        elif how == "line-doubled":
            lines.insert(at, lines[at])
        elif how == "lines-swapped":
            lines[at], lines[to] = lines[to], lines[at]
        else:
            lines.reverse()
        return self.written(how, path, b"".join(lines))

    def of_values(self, path: Path, data: bytes) -> Change | None:
        """A value of a JSON file, or of one line of it, or of a table, replaced by a likely other one."""
        if path.suffix == ".csv":
            return self.of_cells(path, data)
        lines = data.splitlines(keepends=True) if path.suffix == ".jsonl" else [data]
        if not lines or path.suffix not in (".json", ".jsonl"):
            return None
        at = self.rng.randrange(len(lines))
        value = copy.deepcopy(json.loads(lines[at]))
        places = [(c, k) for c, k in _places(value)]
        if not places:
            return None
        wanted = [p for p in places if p[1] in SEMANTIC]
        outer, key = self.rng.choice(wanted if wanted and self.rng.random() < 0.5 else places)
        outer[key] = _other(outer[key], self.rng)
        spelled = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        if json.loads(spelled) == json.loads(lines[at]):
            return None
        lines[at] = spelled + (b"\n" if lines[at].endswith(b"\n") else b"")
        return self.written(f"value-{key if key in SEMANTIC else 'other'}", path, b"".join(lines))

    def of_cells(self, path: Path, data: bytes) -> Change | None:
        rows = [line.split(",") for line in data.decode().splitlines()]
        if len(rows) < 2:
            return None
        row = self.rng.choice(rows[1:])
        row[self.rng.randrange(len(row))] = self.rng.choice(["0.001", "1", "-1", "nan", "", "1e999", "x"])
        return self.written("cell", path, "".join(",".join(r) + "\n" for r in rows).encode())

    def of_names(self, path: Path, data: bytes) -> Change | None:
        how = self.rng.choice(["removed", "renamed", "added", "linked", "moved"])
        other = path.with_name(path.name + self.rng.choice([".old", "~", "2", ".json"]))
        where = path.relative_to(self.root)
        if how == "removed":
            return f"removed {where}", path.unlink, lambda: _write(path, data)
        if how == "renamed":
            return f"renamed {where}", lambda: os.rename(path, other), lambda: os.rename(other, path)
        if how == "added":
            return f"added {where}", lambda: _write(other, data), other.unlink
        if how == "linked":
            return f"linked {where}", lambda: _link(path, other), lambda: _unlink(path, other)
        away = self.root / f"moved-{path.name}"
        if away.exists():
            return None
        return f"moved {where}", lambda: os.rename(path, away), lambda: os.rename(away, path)

    def of_siblings(self, path: Path, data: bytes) -> Change | None:
        """The file of the same name of another pod or phase, or any other file, in its place."""
        same = [p for p in self.files if p.name == path.name and p != path]
        other = self.rng.choice(same or list(self.files))
        return self.written("sibling", path, self.files[other])


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _link(path: Path, other: Path) -> None:
    shutil.move(path, other)
    path.symlink_to(other.name)


def _unlink(path: Path, other: Path) -> None:
    path.unlink()
    shutil.move(other, path)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def _other(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, 0, value * 2 + 1])
    if isinstance(value, float):
        return rng.choice([0.9999, value + 0.01, value / 2 + 1e-9])
    if isinstance(value, str):
        return rng.choice([value[:-1] + ("0" if value[-1:] != "0" else "1"), "hyperstack", "00" * 32, ""])
    return rng.choice([None, [], {}])
