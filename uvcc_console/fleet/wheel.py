"""The engine as one wheel, byte-identical wherever it is built from the same sources: its SHA-256 is the code hash.

Members are stored, not deflated (zlib versions differ), in sorted order, with a fixed time and mode.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import os
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from uvcc_engine.contract.errors import UnreadableError, UvccError

_TIME = (1980, 1, 1, 0, 0, 0)
_SKIP = ("__pycache__", ".pyc", ".pyo", ".so", ".swp", "~", ".tmp")
_WHEEL = "Wheel-Version: 1.0\nGenerator: uvcc\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@dataclass(frozen=True, slots=True)
class Wheel:
    """A built wheel. ``site_name`` is the folder it is unpacked to on a pod."""

    path: Path
    sha256: str

    @property
    def site_name(self) -> str:
        return f"site-{self.sha256[:12]}"


def engine_package() -> Path:
    """The folder of the installed engine; it is found, not imported."""
    spec = importlib.util.find_spec("uvcc_engine")
    if spec is None or not spec.submodule_search_locations:
        raise UnreadableError("the package uvcc_engine is not installed", "pip install .")
    return Path(next(iter(spec.submodule_search_locations)))


def _sources(package: Path) -> list[tuple[str, bytes]]:
    found = []
    for folder, _, files in os.walk(package):
        for name in files:
            path = Path(folder, name)
            inside = path.relative_to(package.parent).as_posix()
            if not any(inside.endswith(s) or f"/{s}/" in inside for s in _SKIP):
                found.append((inside, path.read_bytes()))
    return sorted(found)


def engine_requirements(extra: str = "engine") -> list[str]:
    """What a pod needs beside its image's torch: the requirements of one of this installation's extras."""
    try:
        wanted = importlib.metadata.requires("uvcc") or []
    except importlib.metadata.PackageNotFoundError:
        wanted = []
    found = (r.replace("'", '"').partition(";") for r in wanted)
    return sorted(name.strip() for name, _, marker in found if f'extra == "{extra}"' in marker)


def _metadata(name: str, version: str) -> str:
    """Core metadata; what a pod needs stays an extra, since the wheel is unpacked, not installed."""
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Requires-Python: >=3.11"]
    lines += ["Provides-Extra: engine"]
    lines += [f'Requires-Dist: {r}; extra == "engine"' for r in engine_requirements()]
    return "\n".join(lines) + "\n"


def _version(package: Path) -> str:
    for line in (package / "__init__.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.split("=", 1)[1].strip().strip("\"'")
    raise UnreadableError(f"{package} has no __version__", "reinstall the package")


def build_wheel(folder: Path, package: Path | None = None) -> Wheel:
    """Build the wheel of ``package`` (default: the installed engine) into ``folder``.

    Raises UnreadableError when the sources cannot be read, UvccError when the wheel cannot be written.
    """
    package = package or engine_package()
    try:
        members = _sources(package)
        version = _version(package)
    except OSError as e:
        raise UnreadableError(f"cannot read the engine's sources: {e}", "reinstall the package") from e
    name = package.name
    info = f"{name}-{version}.dist-info"
    members += [(f"{info}/METADATA", _metadata(name, version).encode()), (f"{info}/WHEEL", _WHEEL.encode())]
    record = "".join(f"{inside},sha256={_digest64(data)},{len(data)}\n" for inside, data in members)
    members.append((f"{info}/RECORD", f"{record}{info}/RECORD,,\n".encode()))
    path = folder / f"{name}-{version}-py3-none-any.whl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.NamedTemporaryFile(dir=folder, prefix=".wheel-", delete=False) as out,
            zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive,
        ):
            for inside, data in members:
                entry = zipfile.ZipInfo(inside, _TIME)
                entry.create_system = 3
                entry.external_attr = 0o100644 << 16
                archive.writestr(entry, data)
        os.replace(out.name, path)
    except OSError as e:
        raise UvccError(f"cannot write the engine wheel in {folder}: {e.strerror}", "is the disk full?") from e
    return Wheel(path, hashlib.sha256(path.read_bytes()).hexdigest())


def _digest64(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
