"""argv: modules -- distributions. Prints which of them this Python lacks and the versions of those it has, as JSON."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import sysconfig

DISTRIBUTIONS = {"yaml": "PyYAML", "google_crc32c": "google-crc32c"}


def version_of(distribution: str) -> str:
    """Empty when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main(argv: list[str]) -> None:
    modules, _, packages = " ".join(argv).partition("--")
    missing: list[str] = []
    versions = {"python": platform.python_version()}
    for name in modules.split():
        if importlib.util.find_spec(name) is None:
            missing.append(name)
        else:
            versions[name] = version_of(DISTRIBUTIONS.get(name, name)) or "unknown"
    for wanted in packages.split():
        name = re.split(r"[^A-Za-z0-9._-]", wanted, maxsplit=1)[0]
        versions[name] = version_of(name)
        if not versions[name]:
            missing.append(wanted)
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot_id = f.read().strip()
    except OSError:
        boot_id = ""
    found = {
        "python": os.path.abspath(sys.executable),
        "site": sysconfig.get_paths()["platlib"],
        "missing": missing,
        "gpu": shutil.which("nvidia-smi") is not None,
        "versions": versions,
        "boot_id": boot_id,
        "home": os.path.expanduser("~"),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
