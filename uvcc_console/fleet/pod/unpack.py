"""argv: wheel, its SHA-256, folder. Verifies, unpacks beside and renames; CODE_HASH is written last."""

import hashlib
import json
import os
import re
import shutil
import stat
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


def main(wheel: str, wanted: str, folder: str) -> None:
    with open(wheel, "rb") as f:
        found = hashlib.sha256(f.read()).hexdigest()
    if found != wanted:
        sys.exit(f"the wheel arrived damaged: sha256 {found[:12]}, wanted {wanted[:12]}")
    fresh = f"{folder}.{os.getpid()}"
    with zipfile.ZipFile(wheel) as archive:
        check(archive.infolist())
        archive.extractall(fresh)
    with open(os.path.join(fresh, "CODE_HASH"), "w") as out:
        out.write(wanted)
    if os.path.isdir(folder):
        shutil.rmtree(folder)  # a half-made one: a whole one would have its CODE_HASH and never come here
    os.rename(fresh, folder)
    print(json.dumps({"ok": True}))


if __name__ == "__main__":
    main(*sys.argv[1:4])
