"""argv: root, seconds. Stays behind on this host and ends what was started under the root when the time is over.

It needs nobody: neither the console, which may be gone for good, nor the agent. It goes by the machine's counter since
boot, ends only processes that carry the root's mark in their environment, and removes no file. It goes earlier when the
root is removed or when a later keeper has taken its place. Prints one JSON object and returns at once.
"""

import json
import os
import signal
import sys
import time

NAME = "keeper.json"
LOOK_S = 20.0
GRACE_S = 10.0
LONGEST_S = 60.0


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def starttime(pid: int) -> int:
    """When the process was started, in ticks since boot; 0 if there is none (a zombie has ended)."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[19]) if fields[0] not in "ZX" else 0


def started_here(root: str) -> list[int]:
    """Processes that carry the root's mark, this one left out."""
    needle, found = f"UVCC_ROOT={root}".encode(), []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid() or not starttime(int(name)):
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as f:
                environ = f.read()
        except OSError:
            continue
        if needle in environ.split(b"\0"):
            found.append(int(name))
    return found


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def known(root: str) -> tuple[int, int]:
    """The keeper that said last to be it: pid and start time; (0, 0) without one."""
    try:
        with open(os.path.join(root, NAME)) as f:
            found = json.load(f)
        return int(found["pid"]), int(found["starttime"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0, 0


def take_over(root: str) -> None:
    """Be the keeper of this root from now on."""
    pid, start = known(root)
    if pid and pid != os.getpid() and starttime(pid) == start:
        send([pid], signal.SIGKILL)
    partial = os.path.join(root, f".{NAME}.{os.getpid()}")
    with open(partial, "w") as f:
        json.dump({"pid": os.getpid(), "starttime": starttime(os.getpid())}, f)
    os.replace(partial, os.path.join(root, NAME))


def end_all(root: str) -> list[int]:
    """TERM, then KILL, until nothing is left; returns what would not end. A stopped process is woken for its TERM."""
    begin = time.monotonic()
    termed: set[int] = set()
    while left := started_here(root):
        waited = time.monotonic() - begin
        if waited > LONGEST_S:
            return left
        if waited < GRACE_S:
            fresh = [pid for pid in left if pid not in termed]
            send(fresh, signal.SIGTERM)
            send(fresh, signal.SIGCONT)
            termed.update(fresh)
        else:
            send(left, signal.SIGKILL)
        time.sleep(0.1)
    return []


def keep(root: str, end: float) -> None:
    me = (os.getpid(), starttime(os.getpid()))
    while (left := end - boottime()) > 0:
        time.sleep(min(LOOK_S, left))
        if known(root) != me:
            return
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} the run's time is over: its processes here are ended", flush=True)
    if rest := end_all(root):
        print(f"{rest} would not end", flush=True)


def main(root: str, seconds: float) -> None:
    end = boottime() + seconds
    read, write = os.pipe()
    if os.fork():
        os.close(write)
        with os.fdopen(read) as told:
            print(told.readline() or '{"keeper": 0}', flush=True)
        return
    os.close(read)
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(os.path.join(root, "keeper.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.chdir("/")
    take_over(root)
    os.write(write, json.dumps({"keeper": os.getpid()}).encode() + b"\n")
    os.close(write)
    keep(root, end)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
