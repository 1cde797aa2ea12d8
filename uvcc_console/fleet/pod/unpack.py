"""argv: wheel, its SHA-256, folder. Verifies, unpacks beside and renames; CODE_HASH is written last.

UVCC_BYTECODE: the installed package of the same name, where the pod shares a machine with it.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import stat
import struct
import sys
import zipfile

MOST_FILES = 10000
MOST_BYTES = 512 << 20
PLAIN = re.compile(r"(?!\.\.?(/|$))[A-Za-z0-9._+-]+(/(?!\.\.?(/|$))[A-Za-z0-9._+-]+)*/?")


def check(entries: list[zipfile.ZipInfo]) -> None:
    """Refuse an archive that would write elsewhere, twice, links, or more than any wheel of ours holds."""
    names = [e.filename for e in entries]
    for entry in entries:
        if not PLAIN.fullmatch(entry.filename) or stat.S_ISLNK(entry.external_attr >> 16):
            sys.exit(f"the wheel holds {entry.filename[:80]!a}, which is no file of a wheel")
    if len(names) > MOST_FILES or sum(e.file_size for e in entries) > MOST_BYTES:
        sys.exit("the wheel unpacks to more than any wheel does")
    if len({n.casefold() for n in names}) != len(names):
        sys.exit("the wheel holds a file twice")


def bytecode_of(source: str) -> bytes:
    """What Python has compiled of this file and would run; empty if there is none or anybody may write it."""
    try:
        with open(importlib.util.cache_from_source(source), "rb") as f:
            found, kept = f.read(), os.fstat(f.fileno())
        its = os.stat(source)
    except OSError:
        return b""
    fits = importlib.util.MAGIC_NUMBER + struct.pack(
        "<III", 0, int(its.st_mtime) & 0xFFFFFFFF, its.st_size & 0xFFFFFFFF
    )
    guarded = not (kept.st_mode | its.st_mode) & stat.S_IWOTH
    return found if guarded and found.startswith(fits) else b""


def take_over(package: str, copies: str) -> None:
    """Begin with what this machine's installation at ``package`` has compiled of the same sources: a pod's first
    imports would compile for a second what the pods beside it compile as well."""
    above = os.path.dirname(package)
    for folder, _, names in os.walk(os.path.join(copies, os.path.basename(package))):
        for mine in (os.path.join(folder, name) for name in names if name.endswith(".py")):
            theirs = os.path.join(above, os.path.relpath(mine, copies))
            compiled = bytecode_of(theirs)
            if not compiled:
                continue
            with open(theirs, "rb") as one, open(mine, "rb") as other:
                if one.read() != other.read():
                    continue
            cached = importlib.util.cache_from_source(mine)
            os.makedirs(os.path.dirname(cached), exist_ok=True)
            with open(cached, "wb") as out:
                out.write(compiled)
            os.utime(mine, ns=(os.stat(theirs).st_mtime_ns,) * 2)  # by which Python tells that it fits


def main(wheel: str, wanted: str, folder: str) -> None:
    with open(wheel, "rb") as f:
        found = hashlib.sha256(f.read()).hexdigest()
    if found != wanted:
        sys.exit(f"the wheel arrived damaged: sha256 {found[:12]}, wanted {wanted[:12]}")
    fresh = f"{folder}.{os.getpid()}"
    with zipfile.ZipFile(wheel) as archive:
        check(archive.infolist())
        archive.extractall(fresh)
    if os.environ.get("UVCC_BYTECODE"):
        take_over(os.environ["UVCC_BYTECODE"], fresh)
    with open(os.path.join(fresh, "CODE_HASH"), "w") as out:
        out.write(wanted)
    if os.path.isdir(folder):
        shutil.rmtree(folder)  # a half-made one: a whole one would have its CODE_HASH and never come here
    os.rename(fresh, folder)
    print(json.dumps({"ok": True}))


if __name__ == "__main__":
    main(*sys.argv[1:4])
