"""What one pane of a federated demo's tmux layout shows: a domain's console, or what owners and auditor do.

``python -m uvcc_console.federation.demo.pane FOLDER NAME UID TEMP``; a UID of -1 stands for the user who runs it.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from uvcc_console.federation.demo.people import DOMAINS, MAIN, Person
from uvcc_console.federation.demo.story import run_in
from uvcc_engine.contract.text import clean_block

LOOK_S: Final = 0.3
COLUMNS, LINES = 60, 20  # what the console needs


def become(person: Person) -> None:
    """Go on as this person, for good. Raises OSError."""
    if person.uid is not None:
        os.setgroups([])
        os.setgid(person.uid)
        os.setuid(person.uid)
    os.chdir(person.home)


def console(person: Person, *, small: bool) -> tuple[str, ...]:
    """The command that shows a domain's run; where the console does not fit, its line of progress."""
    run = run_in(person)
    assert run is not None
    return (*MAIN, "attach", run.name, *(("--headless",) if small else ()))


def follow(*logs: Path, until: Callable[[], bool] = lambda: False) -> None:
    """Show what is written to these files, until something holds or the terminal goes away."""
    at = dict.fromkeys(logs, 0)
    while not until():
        for log in logs:
            if log.exists() and log.stat().st_size > at[log]:
                with log.open("rb") as file:
                    file.seek(at[log])
                    text = file.read().decode(errors="replace")
                    at[log] = file.tell()
                sys.stdout.write(clean_block(text))
                sys.stdout.flush()
        time.sleep(LOOK_S)


def main() -> int:
    """Entry point: FOLDER NAME UID TEMP; the names of several are joined by commas."""
    folder, names, uid, temp = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]), Path(sys.argv[4])
    sys.stdout.write(f"{' and '.join(names)}\n")
    sys.stdout.flush()
    if names[0] not in DOMAINS:
        follow(*(folder / f"{name}.log" for name in names))
    person = Person(names[0], folder / names[0], temp / names[0], uid if uid >= 0 else None)
    follow(folder / f"{person.name}.log", until=lambda: run_in(person) is not None)
    size = shutil.get_terminal_size()
    become(person)
    command = console(person, small=size.columns < COLUMNS or size.lines < LINES)
    os.execve(command[0], command, person.environment())


if __name__ == "__main__":
    sys.exit(main())
