"""argv: wheel, its SHA-256, folder. Verifies, unpacks beside and renames; CODE_HASH is written last."""

import hashlib
import json
import os
import shutil
import sys
import zipfile


def main(wheel: str, wanted: str, folder: str) -> None:
    with open(wheel, "rb") as f:
        found = hashlib.sha256(f.read()).hexdigest()
    if found != wanted:
        sys.exit(f"the wheel arrived damaged: sha256 {found[:12]}, wanted {wanted[:12]}")
    fresh = f"{folder}.{os.getpid()}"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(fresh)
    with open(os.path.join(fresh, "CODE_HASH"), "w") as out:
        out.write(wanted)
    if os.path.isdir(folder):
        shutil.rmtree(folder)  # a half-made one: a whole one would have its CODE_HASH and never come here
    os.rename(fresh, folder)
    print(json.dumps({"ok": True}))


if __name__ == "__main__":
    main(*sys.argv[1:4])
