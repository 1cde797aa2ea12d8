"""One folder, read again and again: what is new of its files, as events of a run.

A folder with the run contract is read as an agent's lines are, by the same decoder. Any other is a bare one: its tables
and event files give figures, its logs lines, and what is written to it is its only sign of life.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.follow import listing
from uvcc_console.follow.columns import DelimitedTable, FigureNames, FigureRow, JsonLinesTable
from uvcc_console.follow.file_tail import PIECE, Tail
from uvcc_console.follow.folder_files import (
    coord_of,
    label_of,
    matches_any,
    of_contract,
    reading_order,
    run_id_of,
    steps_of,
    with_coord,
)
from uvcc_console.follow.listing import FileStat, FolderListing
from uvcc_console.follow.shells import Shell
from uvcc_console.follow.tfevents import EventFile
from uvcc_console.follow.vital_signs import SCRIPT, VitalSigns
from uvcc_console.rollout.decoder import LINE, Decoder
from uvcc_engine.contract.agent_protocol.agent_messages import Lines
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.parsing.untrusted import STEPS, as_int, as_object
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.text import clean, counted

SCAN_S: Final = 5.0
VITALS_S: Final = 15.0
FRESH_S: Final = 6.0  # what was written longer ago is shown as old, not as a sign of life of now
MOST_FOLLOWED: Final = 64
MOST_RANKS: Final = 64
PIECES: Final = 8  # of one file in one look
FILE_PHASE: Final = "file"
PHASE: Final = "follow"
BARE: Final = "there is no run contract: a table has nobody who looks at a control file"
_LOG_LAST: Final = 64 << 10
_RANK: Final = re.compile(r"heartbeat_rank([0-9]{1,6})\.jsonl")


class FolderReader:
    """Reads one folder. ``cursors`` (file -> inode and offset) of an earlier reader let it go on from there.

    ``contract`` and ``why_no_halt`` are told once something was found; ``behind``: there is more to read at once.
    """

    def __init__(
        self,
        shell: Shell,
        folder: str,
        cursors: Mapping[str, Sequence[int]] | None = None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shell, self.folder = shell, folder
        self.contract = False
        self.why_no_halt = "nothing was found there yet that could be halted"
        self.behind = False
        self.run = ""
        self.pod = "p0r0"
        self.coord = "p0r0s0t0"
        self.steps = 0
        self._clock, self._monotonic = clock, monotonic
        self._cursors = {name: list(at) for name, at in (cursors or {}).items() if len(at) == 2}
        self._known: dict[str, FileStat] = {}
        self._tails: dict[str, Tail] = {}
        self._tables: dict[str, DelimitedTable | JsonLinesTable] = {}
        self._events: dict[str, EventFile] = {}
        self._documents: dict[str, FileStat] = {}
        self._names = FigureNames()
        self._decoder: Decoder | None = None
        self._vitals = VitalSigns(self.pod)
        self._scan_at = self._vitals_at = float("-inf")
        self._begun = ""
        self._alive: set[str] = set()
        self._left = False  # the lead worker's exit record was read
        self.failed = ""
        self.how = ""  # what the newest exit record calls the end
        self._beats: dict[str, float] = {}  # by worker: when its heartbeat file was written last, by that machine
        self._told: set[str] = set()
        self._step = -1

    @property
    def followed(self) -> list[str]:
        """The files that are read, by their names in the folder."""
        return sorted(self._known)

    async def probe(self) -> None:
        """See what is there, without reading it. Raises as :meth:`look` does."""
        found, _ = await self._asked(listing.scan_script(self.folder))
        self._chosen(found)
        self._scan_at = float("-inf")
        self._told.clear()

    async def look(self) -> list[ev.Event]:
        """What is new. Raises UnreachableError, UnreadableError for a folder that is not there, UvccError."""
        now = self._monotonic()
        with_vitals = now >= self._vitals_at
        if now >= self._scan_at:
            found, _ = await self._asked(listing.scan_script(self.folder))
            self._scan_at = self._monotonic() + max(SCAN_S, 10 * (self._monotonic() - now))
            events = self._chosen(found)
        else:
            names = [*self._known, *(listing.CONTRACT if self.contract else ())]  # an exit record may be there by now
            found, out = await self._asked(listing.stat_script(self.folder, names, SCRIPT if with_vitals else ""))
            self._known |= found.files
            events = []
            if with_vitals:
                self._vitals_at = now + VITALS_S
                told = self._vitals.read(out)
                events += [told] if told is not None else []
        self.behind = False
        await self._learn()
        for name in sorted(self._known, key=reading_order):
            events += await self._read(name, self._known[name], found.now)
        return events

    async def _asked(self, script: str) -> tuple[FolderListing, bytes]:
        said = await self.shell.run(script)
        return listing.parse(said.out, self.folder, self.shell.where), said.out

    # ---- which files

    def _chosen(self, found: FolderListing) -> list[ev.Event]:
        """The files to follow from now on: those of the contract where there is one, else tables and logs."""
        ours = {n: s for n, s in found.files.items() if of_contract(n)}
        contract = any(files.is_heartbeat(n) or n == files.RUN_JSON for n in ours)
        events: list[ev.Event] = []
        if contract and not self.contract:
            self.contract, self.why_no_halt = True, ""
            self._forget_bare()
        if self.contract:
            wanted = ours | {n: s for n, s in found.files.items() if "/" not in n and matches_any(n, listing.LOGS)}
        else:
            wanted = {n: s for n, s in found.files.items() if matches_any(n, (*listing.TABLES, *listing.LOGS))}
            self.why_no_halt = BARE if wanted else self.why_no_halt
        kept = sorted(
            wanted,
            key=lambda n: (not of_contract(n), matches_any(n, listing.LOGS), n not in self._known, -wanted[n].mtime),
        )
        self._known = {n: wanted[n] for n in kept[:MOST_FOLLOWED]}
        more = len(kept) - MOST_FOLLOWED
        if found.more or more > 0:
            count = f"more than {listing.MOST_LISTED} files" if found.more else counted(len(kept), "file")
            events += self._once(
                "many",
                ev.Alert(
                    level="warn",
                    name="follow",
                    text=f"{count} could be followed there, {MOST_FOLLOWED} are",
                    hint="name a folder further down",
                ),
            )
        if found.refused:
            text = f"{counted(found.refused, 'file')} have names that cannot be shown, and are not read"
            events += self._once("names", ev.Alert(level="warn", name="follow", text=text, hint="rename them"))
        return events

    def _forget_bare(self) -> None:
        """What was read as a stranger's table is a file of the contract: it is read again as such."""
        for name in [n for n in self._tails if of_contract(n)]:
            del self._tails[name]

    def _once(self, key: str, event: ev.Event) -> list[ev.Event]:
        fresh = key not in self._told
        self._told.add(key)
        return [event] if fresh else []

    async def _learn(self) -> None:
        """Which run and which worker the contract's files are of, before the first line of them is translated."""
        if not self.contract or self._decoder is not None:
            return
        read: dict[str, Any] = {}
        for name in (files.RUN_JSON, files.exit_name(0)):
            if name in self._known and not self.run:
                said = await self.shell.run(listing.read_script(self.folder, name, 0, PIECE), limit=2 * PIECE)
                read = as_object(said.out) or {}
                self.run = run_id_of(read.get("run"))
        beat = next((n for n in self._known if files.is_heartbeat(n)), "")
        if not read.get("coord") and beat:
            said = await self.shell.run(listing.read_script(self.folder, beat, 0, 1 << 16), limit=1 << 17)
            read = as_object(said.out.partition(b"\n")[0]) or {}
        if not self._begun:
            coord = coord_of(read.get("coord")) or Coord(0, 0, 0, 0)
            self.pod, self.coord = f"p{coord.party}r{coord.replica}", str(coord)
        self._vitals.pod = self.pod
        self._decode()

    def _decode(self) -> None:
        """A decoder for the run that the files are of."""
        c = Coord.parse(self.coord)
        ranks = [f"p{c.party}r{r}s0t0" for r in range(MOST_RANKS)]
        grid = [f"{self.pod}s{s}t{t}" for s in range(8) for t in range(8)]
        self._decoder = Decoder(self.pod, self.run, PHASE, self.coord, coords=[*ranks, *grid], steps=self.steps)

    def begun(self) -> list[ev.Event]:
        """That a run is followed: once for each run that the files turn out to be of."""
        name = self.run or clean(self.folder.rstrip("/").rpartition("/")[2], 80) or "folder"
        if self._begun == name or not self._known:
            return []
        self._begun = name
        return [ev.PhaseStarted(phase=PHASE, engine_run=name, steps=self.steps, sid_job="")]

    # ---- what they hold

    def _tail(self, name: str) -> Tail:
        tail = self._tails.get(name)
        if tail is None:
            tail = self._tails[name] = Tail()
            if matches_any(name, listing.LOGS):
                tail.whole = tail.last = _LOG_LAST
            if name in self._cursors and not self._rereads(name):
                tail.ino, tail.at = self._cursors.pop(name)
        return tail

    def _rereads(self, name: str) -> bool:
        """Whether a file is read from its beginning by a new reader, too: its names, rows and steps are learnt again.

        What an earlier one has told of it is not told again.
        """
        return not self.contract and not matches_any(name, listing.LOGS)

    async def _read(self, name: str, stat: FileStat, there: float) -> list[ev.Event]:
        """What is new of one file, at most so much at once."""
        if name.endswith(".json"):
            return await self._document(name, stat, there)
        events: list[ev.Event] = []
        tail = self._tail(name)
        first = tail.at == 0 and tail.ino == 0
        if became := tail.look(stat):
            self._tables.pop(name, None)
            self._events.pop(name, None)
            self._step = -1
            fields = {"src": clean(name, 200), "reason": became}
            events.append(ev.EngineEvent(pod=self.pod, level="warn", event="rewind", fields=fields))
        if first and tail.skipped and not matches_any(name, listing.LOGS):
            text = f"{clean(name, 200)} has {stat.size >> 20} MiB: only its last {tail.last >> 20} MiB are read"
            events.append(ev.Alert(level="info", name="follow", text=text))
        for _ in range(PIECES):
            offset, count = tail.wants(stat)
            ino, known = self._cursors.get(name, (0, 0))
            old = ino == stat.ino and offset < known
            count = min(count, known - offset) if old else count
            if not count:
                break
            said = await self.shell.run(listing.read_script(self.folder, name, offset, count), limit=2 * PIECE)
            if not said.out:
                break
            told = await self._taken(name, tail, said.out, self._written(stat, there), stat)
            events += [] if old else told
        else:
            self.behind = True
        if tail.overlong:
            count, tail.overlong = tail.overlong, 0
            sample = "a line longer than anybody reads"
            events.append(ev.LinesMalformed(where=self.pod, count=count, src=clean(name, 200), sample=sample))
        return events

    def _written(self, stat: FileStat, there: float) -> float:
        """When a file was written, by our clock; 0 for just now."""
        age = max(0.0, there - stat.mtime)
        return self._clock() - age if age > FRESH_S else 0.0

    async def _document(self, name: str, stat: FileStat, there: float) -> list[ev.Event]:
        """A document is replaced as a whole: it is read whole whenever it is another one."""
        if self._documents.get(name) == stat:
            return []
        said = await self.shell.run(listing.read_script(self.folder, name, 0, PIECE), limit=2 * PIECE)
        self._documents[name] = stat
        return self._decoded(name, [said.out.decode(errors="replace")], self._written(stat, there), stat)

    async def _taken(self, name: str, tail: Tail, data: bytes, at: float, stat: FileStat) -> list[ev.Event]:
        """Bytes of a file as events; ``at`` is when they were written, 0 for just now."""
        if matches_any(name, ("events.out.tfevents.*",)) and not self.contract:
            return self._scalars(name, tail, data, at)
        lines = tail.take(data)
        events: list[ev.Event] = []
        if self.contract:
            events += self._decoded(name, lines, at, stat)
        elif matches_any(name, listing.LOGS):
            shown = [clean(line, LINE) for line in lines]
            events += [ev.LogLines(pod=self.pod, src=clean(name, 200), lines=shown)] if shown else []
        else:
            events += await self._rows(name, lines, at)
        return [*events, ev.CursorMoved(pod=self.pod, cursors={name: tail.cursor})]

    # a bare folder

    async def _rows(self, name: str, lines: Sequence[str], at: float) -> list[ev.Event]:
        table = self._tables.get(name)
        if table is None:
            table = self._tables[name] = JsonLinesTable() if name.endswith(("jsonl", "ndjson")) else DelimitedTable()
            if isinstance(table, DelimitedTable) and self._tails[name].cursor[1] - sum(len(x) + 1 for x in lines) > 0:
                said = await self.shell.run(listing.read_script(self.folder, name, 0, 1 << 16), limit=1 << 17)
                table.header(said.out.partition(b"\n")[0].decode(errors="replace").rstrip("\r"))
        rows = table.rows(lines)
        bad, table.bad = table.bad, 0
        found = self._figures(name, rows, at)
        if bad:
            src = clean(name, 200)
            found.append(ev.LinesMalformed(where=self.pod, count=bad, src=src, sample=f"{bad} rows of no use"))
        return found

    def _scalars(self, name: str, tail: Tail, data: bytes, at: float) -> list[ev.Event]:
        reader = self._events.setdefault(name, EventFile())
        tail.at += len(data)
        rows = [FigureRow(s.step, s.values) for s in reader.feed(data) if 0 <= s.step <= STEPS]
        found = self._figures(name, rows, at)
        if reader.bad:
            count, reader.bad = reader.bad, 0
            sample = "records whose checksum is wrong" + (", and nothing can be read behind them" * reader.broken)
            found.append(ev.LinesMalformed(where=self.pod, count=count, src=clean(name, 200), sample=sample))
        moved = {name: [tail.ino, tail.at - reader.pending]}
        return [*found, ev.CursorMoved(pod=self.pod, cursors=moved)]

    def _figures(self, name: str, rows: Sequence[FigureRow], at: float) -> list[ev.Event]:
        """Rows as metrics, and the newest of them as the sign of life that a bare folder has."""
        label = label_of(name)
        found: list[ev.Event] = []
        last: dict[str, float] = {}
        for row in rows:
            values = {n: v for k, v in row.values.items() if (n := self._names.of(name, label, k))}
            if values:
                last |= values
                found.append(ev.Metric(coord=self.coord, step=row.step, values=values))
                self._step = max(self._step, row.step)
        if last:
            record: dict[str, Any] = {"step": self._step, "phase": FILE_PHASE, "msg": f"written to {clean(name, 100)}"}
            record |= {k: last[k] for k in ("loss", "toks_per_s", "samples_per_s") if k in last}
            found.append(ev.HeartbeatRead(ts=at, pod=self.pod, coord=self.coord, record=record))
        if self._names.refused:
            left = ", ".join(sorted(self._names.refused)[:3])
            text = f"more figures than a run may have: {clean(left, 200)} and others are not drawn"
            found += self._once("figures", ev.Alert(level="warn", name="follow", text=text))
        return found

    # the run contract

    def _decoded(self, name: str, lines: list[str], at: float, stat: FileStat) -> list[ev.Event]:
        assert self._decoder is not None
        base = name.rpartition("/")[2]
        if base.endswith(".json"):
            read = as_object("\n".join(lines)) or {}
            run = run_id_of(read.get("run"))
            if run and base == files.RUN_JSON and run != self.run:
                self.run, self.steps = run, steps_of(read)
                self._decode()
            elif run and not self.run:
                # an exit record tells the name of what was followed all the time: no other run begins with it
                self.run = self._decoder.engine_run = run
                self._begun = run if self._begun else ""
            elif base == files.RUN_JSON:
                self.steps = self.steps or steps_of(read)
        if files.is_heartbeat(base):
            lines = [with_coord(line, self._rank_coord(base)) for line in lines]
        message = Lines(run=self._decoder.engine_run, src=base, ino=stat.ino, off=stat.size, lines=lines)
        found = self._decoder.events(message)
        out: list[ev.Event] = []
        for event in found:
            if isinstance(event, ev.HeartbeatRead):
                out += self._lives(event, at)
                self._beats[event.coord] = stat.mtime
            elif isinstance(event, ev.EngineEvent) and event.event == "exit":
                out += self._ended(event, stat.mtime, base)
            else:
                out.append(event)
        return out

    def _rank_coord(self, name: str) -> str:
        """The worker of a heartbeat file that does not name it: by its rank, as a job of several ranks has them."""
        found = _RANK.fullmatch(name)
        rank = as_int(int(found[1]), 0, MOST_RANKS - 1) if found is not None else 0
        return f"p{Coord.parse(self.coord).party}r{rank}s0t0" if rank else self.coord

    def _lives(self, beat: ev.HeartbeatRead, at: float) -> list[ev.Event]:
        event = replace(beat, ts=at) if at else beat
        if beat.coord in self._alive:
            return [event]
        self._alive.add(beat.coord)
        self._left, self.failed = False, ""
        pid = as_int(beat.record.get("pid"), 0) or 0
        return [ev.WorkerProcess(pod=self.pod, coord=beat.coord, state="started", pid=pid), event]

    def _ended(self, event: ev.EngineEvent, mtime: float, base: str) -> list[ev.Event]:
        """An exit record, and that its worker has ended; one that a later heartbeat contradicts is an earlier run's."""
        coord = str(event.fields.get("coord", self.coord))
        if self._beats.get(coord, 0.0) > mtime + FRESH_S:
            return []
        self.how = str(event.fields.get("status", ""))
        rc = 0 if event.fields.get("status") in ("done", "halted") else 1
        self._alive.discard(coord)
        self._left = self._left or base == files.exit_name(0)
        self.failed = str(event.fields.get("error") or "it failed") if rc else self.failed
        return [event, ev.WorkerProcess(pod=self.pod, coord=coord, state="exited", rc=rc)]

    @property
    def over(self) -> bool:
        """Whether every worker that was ever heard of has left its exit record, the lead one too."""
        return self._left and not self._alive
