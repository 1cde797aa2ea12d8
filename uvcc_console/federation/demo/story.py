"""What the people of a federated demo do, in order: each by commands of its own, as on machines of their own."""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from uvcc_console.federation import data_owner, site_policy
from uvcc_console.federation.demo.people import AUDITOR, DOMAINS, MAIN, OWNERS, RELAY, WHO, Person, Scene
from uvcc_engine.contract.errors import ConfigError, UvccError

PROFILE: Final = "ward.yaml"
PROFILE_TEXT: Final = """\
# ward: two owners' rows of four numbers, in two classes, at three organisations
job:
  kind: private
  model:
    features: 4
    classes: 2
    layers:
      - {type: dense, inputs: 4, outputs: 8}
      - {type: relu, width: 8}
      - {type: dense, inputs: 8, outputs: 2}
  steps: 20
  batch: 32
  lr: 0.2
  test_rows: 30
  reveal: [loss, accuracy, weights]
fleet: {provider: local}
link:  direct
smoke: {steps: 0}
"""
ROWS: Final = 150
PATIENCE_S: Final = 240
LOOK_S: Final = 1.0
_READY_S: Final = 30.0
_WHY: Final = re.compile(r"^(?:error: .+|the conductor of \S+ died|\S+: (?:failed|halted|torn_down)\b.*)", re.MULTILINE)
Say = Callable[[str], None]


@dataclass(slots=True)
class Story:
    """A demo under way. ``say`` is given each line for the reader; ``ended`` is set when nothing shall begin any more.

    ``listen``: the port of the relay, 0 for a free one.
    """

    stage: Scene
    say: Say
    listen: int = 0
    conducting: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)
    code: int = 1
    url: str = ""
    proposal: str = ""

    def play(self) -> int:
        """From the keys to the auditor's verdict; returns the exit code of ``uvcc verify``.

        Raises UvccError naming who could not go on, with that one's own words.
        """
        self.say(f"people       {self.stage.how}")
        self.say(f"kept in      {self.stage.folder}")
        self._relay()
        self._keys()
        self._agree()
        self._conduct()
        self._share()
        self.wait()
        self.code = self._judge()
        return self.code

    def log_of(self, name: str) -> Path:
        """Where what somebody's commands say is kept."""
        return self.stage.folder / f"{name}.log"

    def interrupt(self) -> None:
        """Have the conductors give back what they drive. What does not end by itself, the keeper ends."""
        self.ended.set()
        for process in self.conducting.values():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        end = time.monotonic() + 20.0
        for process in self.conducting.values():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    # what they do

    def _relay(self) -> None:
        person, tokens = self.stage.people[RELAY], []
        for number, name in enumerate((*DOMAINS, *OWNERS)):
            token = secrets.token_hex(16)
            self.stage.people[name].give(self.stage.people[name].home / "token", token)
            who = {"party": number} if number < len(DOMAINS) else {"owner": number - len(DOMAINS)}
            tokens.append({**who, "group": "demo", "token": token})
        ready = person.home / "ready"
        config = {"db": "relay.db", "listen": f"127.0.0.1:{self.listen}", "ready_file": "ready", "credentials": tokens}
        person.give(person.home / "relay.json", json.dumps(config))
        command = (sys.executable, "-m", "uvcc_engine.cli", "relay", "--config", str(person.home / "relay.json"))
        with self.log_of(RELAY).open("a") as out:
            process = person.start(command, out=out)
        end = time.monotonic() + _READY_S
        while not (ready.exists() and ready.stat().st_size):
            if process.poll() is not None or time.monotonic() > end or self.ended.is_set():
                said = self.log_of(RELAY).read_text().strip().splitlines()[-2:]
                raise UvccError(f"the relay did not start: {' '.join(said)[:300]}", "another --port, or none")
            time.sleep(0.05)
        self.url = json.loads(ready.read_text())["url"]

    def _keys(self) -> None:
        def make(name: str) -> str:
            if name in DOMAINS:
                self._run(name, "domain", "init")
                found = json.loads(self._run(name, "domain", "show", "--json"))
                key, about = str(found["key"]), str(found["fingerprint"])
            else:
                self._run(name, "owner", "init")
                key = (self.stage.people[name].home / "config" / "owner" / data_owner.PUBLIC).read_text().strip()
                about = " ".join(key.split()[:2])[-16:]
            self.pub(name).write_text(f"{key}\n")
            self.pub(name).chmod(0o644)
            return about

        names = (*DOMAINS, *OWNERS)
        for name, about in zip(names, self._each(make, names), strict=True):
            self.say(self._who(name, about))
        for name in (RELAY, AUDITOR):
            self.say(self._who(name, self.url if name == RELAY else "nothing else"))
        first = " ".join(self.pub(DOMAINS[0]).read_text().split()[:2])
        rules = {
            "yes_for": [first],
            "reveal": ["loss", "accuracy"],
            "reveal_to_owner": ["weights"],
            "min_rows": 20,
        }
        for name in DOMAINS:
            person = self.stage.people[name]
            person.give(person.home / "config" / "domain" / site_policy.FILE, json.dumps(rules))
            person.give(person.home / PROFILE, PROFILE_TEXT)

    def _agree(self) -> None:
        keys = [part for name in DOMAINS for part in ("--domain", str(self.pub(name)))]
        keys += [part for name in OWNERS for part in ("--owner", str(self.pub(name)))]
        done = self._run(DOMAINS[0], "propose", PROFILE, *keys, "--json", *self.meets(DOMAINS[0]))
        self.proposal = str(json.loads(done[done.index("{") :])["proposal"])
        self.say(
            f"proposed     {self.proposal[:16]} by {DOMAINS[0]}: four numbers a row, 20 steps, weights to {OWNERS[0]}"
        )

        def approve(name: str) -> str:
            if name in DOMAINS:
                said = self._run(name, "join", self.proposal, "--yes", *self.meets(name))
                return _line(said, "signed as")
            self._run(name, "owner", "pin", *(str(self.pub(domain)) for domain in DOMAINS))
            return "pinned the three domains' keys"

        names = (*DOMAINS, *OWNERS)
        for name, word in zip(names, self._each(approve, names), strict=True):
            self.say(f"{name:<12} {word}")

    def _conduct(self) -> None:
        for name in DOMAINS:
            of = ("--proposal", self.proposal, "--domain", "--headless", "--wait", str(PATIENCE_S))
            with self.log_of(name).open("a") as out:
                command = (*MAIN, "rollout", PROFILE, *of, *self.meets(name))
                self.conducting[name] = self.stage.people[name].start(command, out=out)
        for name in OWNERS:
            rows = rows_of(name)
            self.stage.people[name].give(self.stage.people[name].home / "rows.csv", rows)
            self._run(name, "owner", "requests", *self.meets(name))

    def _share(self) -> None:
        def share(name: str) -> str:
            data = str(self.stage.people[name].home / "rows.csv")
            waits = ("--yes", "--wait", str(PATIENCE_S))
            said = self._run(name, "owner", "share", self.proposal, "--data", data, *waits, *self.meets(name))
            return _line(said, "shared").partition(";")[0].removeprefix("shared").strip()

        for name, what in zip(OWNERS, self._each(share, OWNERS), strict=True):
            self.say(f"{name:<12} split and sealed {what} to the pods of the three domains")

    def wait(self) -> None:
        """Until all three conductors have ended. Raises UvccError with the words of each that failed."""
        end = time.monotonic() + PATIENCE_S
        failed: list[str] = []
        for name, process in self.conducting.items():
            try:
                code = process.wait(max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise UvccError(f"{name} has not ended after {PATIENCE_S} s", f"see {self.log_of(name)}") from None
            self._go_on()
            if code:
                failed.append(self._why(name, code))
            else:
                self.say(f"{name:<12} gave its pods back and verified the whole run by itself")
        if failed:
            raise UvccError("; ".join(failed), f"the logs are in {self.stage.folder}")

    def _why(self, name: str, code: int) -> str:
        return f"{name}: {verdict_of(self.log_of(name).read_text()) or f'ended with {code}'}"

    def _all_conduct(self) -> None:
        """Raises UvccError with the words of each conductor that has failed already: nobody need wait for its pods."""
        if failed := [self._why(name, code) for name, process in self.conducting.items() if (code := process.poll())]:
            raise UvccError("; ".join(failed), f"the logs are in {self.stage.folder}")

    def _judge(self) -> int:
        auditor = self.stage.people[AUDITOR]
        handed = auditor.home / "handed-over"
        shutil.copytree(self.run_of(DOMAINS[1]) / "artifacts", handed, symlinks=True)
        auditor.owns(handed)
        pinned = [part for name in DOMAINS for part in ("--domain", str(self.pub(name)))]
        codes: list[int] = []

        def act(name: str) -> str:
            if name == AUDITOR:
                code, said = self.tried(name, "verify", str(handed), *pinned)
                codes.append(code)
                return said
            out = str(self.stage.people[name].home / "results")
            return self._run(name, "owner", "results", self.proposal, "--out", out, *self.meets(name))

        verdict, opened, second = self._each(act, (AUDITOR, *OWNERS))
        self.say(f"{OWNERS[0]:<12} {_line(opened, 'receipt').removeprefix('receipt').strip()}")
        for name, said in zip(OWNERS, (opened, second), strict=True):
            last = said.strip().splitlines()[-1].strip()
            self.say(f"{name:<12} " + (f"opened {last}" if name == OWNERS[0] else " ".join(last.split())))
        self.say(f"{AUDITOR:<12} had {DOMAINS[1]}'s artifacts and the public keys of the three domains, and says:")
        for line in verdict.strip().splitlines():
            self.say(f"  {line}")
        return codes[0]

    # how

    def pub(self, name: str) -> Path:
        """Somebody's public key, for all to read."""
        return self.stage.public / f"{name}.pub"

    def meets(self, name: str) -> tuple[str, ...]:
        """The options that lead somebody to the relay."""
        return ("--relay", self.url, "--token-file", str(self.stage.people[name].home / "token"))

    def run_of(self, name: str) -> Path:
        """The run of a domain. Raises UvccError where there is none yet."""
        found = run_in(self.stage.people[name])
        if found is None:
            raise UvccError(f"{name} has begun no run", f"see {self.log_of(name)}")
        return found

    def _who(self, name: str, about: str) -> str:
        uid = self.stage.people[name].uid
        return f"{name:<12} {WHO[name]:<27} {'' if uid is None else f'user {uid}  '}{about}"

    def _go_on(self) -> None:
        if self.ended.is_set():
            raise UvccError("the demo was ended")

    def tried(self, name: str, *args: str) -> tuple[int, str]:
        """Exit code and output of somebody's command, to its end, or to that of a conductor that fails meanwhile."""
        self._go_on()
        process, end = self.stage.people[name].start((*MAIN, *args)), time.monotonic() + 2 * PATIENCE_S
        while True:
            try:
                said, _ = process.communicate(timeout=LOOK_S)
                break
            except subprocess.TimeoutExpired:
                try:
                    self._all_conduct()
                    if time.monotonic() > end:
                        raise UvccError(f"{name}: uvcc {' '.join(args[:2])} has not ended", f"see {self.log_of(name)}")
                except UvccError:
                    process.kill()
                    process.communicate()
                    raise
        with self.log_of(name).open("a") as out:
            out.write(f"$ uvcc {' '.join(args)}\n{said}")
        self._go_on()
        return process.returncode, said

    def _run(self, name: str, *args: str) -> str:
        """The output of somebody's command. Raises UvccError with its words where it fails."""
        code, said = self.tried(name, *args)
        if code:
            why = " ".join(" ".join(said.strip().splitlines()[-2:]).split())
            raise UvccError(f"{name}: uvcc {' '.join(args[:2])} ended with {code}: {why[:300]}")
        return said

    def _each(self, act: Callable[[str], str], names: Sequence[str]) -> list[str]:
        """What several do at the same time, as it would be on machines of their own; two at a time on two cores."""
        with ThreadPoolExecutor(max(2, min(len(names), os.cpu_count() or 2))) as pool:
            return list(pool.map(act, names))


def run_in(person: Person) -> Path | None:
    """The newest run that somebody has begun, if it is whole enough to be shown."""
    found = [p.parent for p in (person.home / "runs").glob("*/conductor.json")]
    return max(found, key=lambda p: p.stat().st_mtime) if found else None


def rows_of(owner: str) -> str:
    """An owner's table: four numbers and a class a row, the same whenever it is asked for."""
    own = random.Random(owner)
    rows = [[own.gauss(0, 1) for _ in range(4)] for _ in range(ROWS)]
    return "".join(",".join(f"{value:.4f}" for value in row) + f",{int(row[0] + row[1] > row[2])}\n" for row in rows)


def port(text: str) -> int:
    """A port for the relay. Raises ConfigError."""
    if not text.isdecimal() or not 0 <= int(text) <= 65_535:
        raise ConfigError(f"--port {text!r} is no port", "a number up to 65535; 0 for a free one")
    return int(text)


def verdict_of(said: str) -> str:
    """Of a conductor's words, the last line that says why its run did not end well; nothing where none does."""
    found = _WHY.findall(said)
    return found[-1][:400] if found else ""


def _line(said: str, beginning: str) -> str:
    found = [line.strip() for line in said.splitlines() if line.strip().startswith(beginning)]
    return found[-1] if found else beginning
