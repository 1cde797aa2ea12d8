"""argv: modules -- distributions. Prints which of them this Python lacks and the versions of those it has, as JSON."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig

DISTRIBUTIONS = {"yaml": "PyYAML", "google_crc32c": "google-crc32c"}


def version_of(distribution: str) -> str:
    """Empty when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def driver_version() -> str:
    """Of the GPUs; empty where there are none, or where nobody tells."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30.0, stdin=subprocess.DEVNULL).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    first = said.strip().splitlines()[0].strip() if said.strip() else ""
    return first if re.fullmatch(r"[0-9]{1,5}(\.[0-9]{1,5}){0,3}", first) else ""


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
        "driver": driver_version(),
        "versions": versions,
        "boot_id": boot_id,
        "home": os.path.expanduser("~"),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
