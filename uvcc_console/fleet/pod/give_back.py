"""argv: pod name. Ends everything that a bootstrap started on this host and removes what it left. Prints ``gone``."""

import contextlib
import os
import shutil
import signal
import sys
import time

ROOT = os.path.join(os.path.expanduser("~"), ".uvcc")
CLAIM = os.path.join(os.path.expanduser("~"), ".uvcc-claim")


def started_here() -> list[int]:
    """Processes whose environment carries the mark of this root."""
    needle, found = f"UVCC_ROOT={ROOT}".encode(), []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as f:
                environ = f.read()
            with open(f"/proc/{name}/stat") as f:
                state = f.read().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if needle in environ.split(b"\0") and state not in "ZX":
            found.append(int(name))
    return found


def end(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def forget_key(name: str) -> None:
    """Drop the line of authorized_keys that ends in this pod's name."""
    path = os.path.join(os.path.expanduser("~"), ".ssh", "authorized_keys")
    if not os.path.exists(path):
        return
    with open(path) as f:
        lines = f.readlines()
    kept = [line for line in lines if not line.rstrip("\n").endswith(f" uvcc-operator-{name}")]
    if kept != lines and not kept:  # the claim made the file, and perhaps its folder
        os.unlink(path)
        with contextlib.suppress(OSError):  # there is something else in it
            os.rmdir(os.path.dirname(path))
    elif kept != lines:
        with open(path + ".uvcc", "w") as f:
            f.writelines(kept)
        os.chmod(path + ".uvcc", os.stat(path).st_mode & 0o777)
        os.replace(path + ".uvcc", path)


def main(name: str) -> None:
    begin = time.monotonic()
    while left := started_here():
        waited = time.monotonic() - begin
        if waited > 10.0:
            print(f"processes {left} would not end")
            return
        end(left, signal.SIGTERM if waited < 2.0 else signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(ROOT, ignore_errors=True)
    if os.path.exists(ROOT):
        print(f"{ROOT} cannot be removed")
        return
    forget_key(name)
    if os.path.islink(CLAIM):
        os.unlink(CLAIM)
    print("gone")


if __name__ == "__main__":
    main(sys.argv[1])
