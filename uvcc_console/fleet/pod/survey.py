"""Prints which of the modules named in argv this Python lacks, and the versions of those it has, as JSON."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys

DISTRIBUTIONS = {"yaml": "PyYAML", "google_crc32c": "google-crc32c"}


def main(names: list[str]) -> None:
    missing: list[str] = []
    versions = {"python": platform.python_version()}
    for name in names:
        if importlib.util.find_spec(name) is None:
            missing.append(name)
            continue
        try:
            versions[name] = importlib.metadata.version(DISTRIBUTIONS.get(name, name))
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot_id = f.read().strip()
    except OSError:
        boot_id = ""
    python = os.path.abspath(sys.executable)
    home = os.path.expanduser("~")
    print(json.dumps({"python": python, "missing": missing, "versions": versions, "boot_id": boot_id, "home": home}))


if __name__ == "__main__":
    main(sys.argv[1:])
