"""A folder of the operator's that a command job takes to its pods (``job.code``): what of it, and as which bytes.

What git would not keep stays here, by git's own word (``.gitignore`` and the like, also in a folder that is no
repository), and so does what looks like a secret. The tree's hash covers names, modes and contents; the archive is the
same bytes for the same tree.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from uvcc_console.plan.schema import CommandJobSettings
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError
from uvcc_engine.contract.parsing.untrusted import as_int, as_object
from uvcc_engine.contract.text import clean, counted

ARCHIVE: Final = "code.tar.gz"
RECORD: Final = "code.json"
MOST_FILES: Final = 20_000
MIB: Final = 1 << 20
SECRETS: Final = (
    ".env",
    ".env.*",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "*.kdbx",
    "id_rsa*",
    "id_ed25519*",
    "id_ecdsa*",
    ".netrc",
    ".npmrc",
    ".pypirc",
    ".htpasswd",
    "credentials",
    "credentials.*",
    "*secret*",
    "*token*",
    ".aws",
    ".ssh",
    ".gnupg",
    ".kube",
)
"""Names, of a file or of a folder on the way to it, that are left here unless ``job.code_include`` names them."""
_TOOLS: Final = (".git", ".hg", ".svn", "__pycache__", ".venv", "venv", ".mypy_cache", ".ruff_cache", ".pytest_cache")
_GIT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class CodeFile:
    """One file: its path in the tree, whether it may be executed, its size and SHA-256."""

    path: str
    executable: bool
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CodeTree:
    """What is uploaded. ``sha256`` is the tree's; ``commit`` "" where git knows none, ``dirty``: changed since it.

    ``left_out``: files that look like secrets, and links, with the reason.
    """

    folder: str
    sha256: str
    files: tuple[CodeFile, ...]
    commit: str = ""
    dirty: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(f.size for f in self.files)

    @property
    def words(self) -> str:
        """The tree in one line."""
        version = f"commit {self.commit[:12]}{', changed since' if self.dirty else ''}" if self.commit else "no commit"
        return f"{counted(len(self.files), 'file')}, {self.bytes / MIB:.1f} MiB, tree {self.sha256[:12]}, {version}"

    def record(self) -> dict[str, Any]:
        """For ``code.json``."""
        return asdict(self) | {"bytes": self.bytes}


def survey(job: CommandJobSettings) -> CodeTree:
    """What of ``job.code`` would be uploaded. Raises ConfigError for a folder that is none, holds nothing, or too much.

    A refusal for size names the largest files.
    """
    folder = Path(job.code).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"job.code: there is no folder {folder}", "a relative path is relative to the profile")
    files: list[CodeFile] = []
    left: list[str] = []
    total = 0
    for name in _names(folder):
        path = folder / name
        if any(part in _TOOLS for part in name.split("/")):
            continue
        if _matches(name, job.code_exclude):
            continue
        if why := _secret(name, job.code_include):
            left.append(f"{name} ({why})")
            continue
        try:
            found = path.lstat()
        except OSError:
            continue  # git still lists what was deleted since
        if not stat.S_ISREG(found.st_mode):
            left.append(f"{name} (a link or no file)")
            continue
        if not name.isprintable():
            raise ConfigError(f"job.code: a name that cannot be shown: {clean(name, 100)}", "rename it, or exclude it")
        total += found.st_size
        files.append(CodeFile(name, bool(found.st_mode & stat.S_IXUSR), found.st_size, ""))
    _check_size(files, total, job.code_mib)
    if not files:
        raise ConfigError(f"job.code: {folder} holds nothing to upload", "is all of it in .gitignore?")
    hashed = tuple(CodeFile(f.path, f.executable, f.size, _sha256(folder / f.path)) for f in sorted(files, key=_path))
    digest = hashlib.sha256()
    for f in hashed:
        digest.update(f"{'755' if f.executable else '644'} {f.sha256} {f.path}\n".encode())
    commit, dirty = _commit(folder)
    return CodeTree(str(folder.resolve()), digest.hexdigest(), hashed, commit, dirty, tuple(left))


def _path(file: CodeFile) -> str:
    return file.path


def _check_size(files: Sequence[CodeFile], total: int, most_mib: float) -> None:
    if total <= most_mib * MIB and len(files) <= MOST_FILES:
        return
    largest = sorted(files, key=lambda f: -f.size)[:5]
    named = ", ".join(f"{f.path} ({f.size / MIB:.1f} MiB)" for f in largest)
    allowed = f"at most {MOST_FILES} of {most_mib:g} MiB may be uploaded"
    what = f"job.code: {counted(len(files), 'file')} of {total / MIB:.1f} MiB, {allowed}; the largest: {named}"
    raise ConfigError(what, "job.code_exclude or .gitignore leave files out; or raise job.code_mib")


def _names(folder: Path) -> Iterator[str]:
    """Relative names by git's word; without git, of a folder where nothing is ignored, all of them."""
    git = shutil.which("git")
    if git is None:
        if any(folder.rglob(".gitignore")):
            raise ConfigError(f"job.code: {folder} has a .gitignore and there is no git to read it", "install git")
        for at, folders, names in os.walk(folder):
            folders[:] = sorted(f for f in folders if f not in _TOOLS)
            yield from ((Path(at) / n).relative_to(folder).as_posix() for n in names)
        return
    if _git(folder, "rev-parse", "--is-inside-work-tree") == b"true\n":
        out = _git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
    else:
        with tempfile.TemporaryDirectory(prefix="uvcc-git-") as empty:
            _git(Path(empty), "init", "-q", "--bare")
            where = (f"--git-dir={empty}", f"--work-tree={folder.resolve()}")
            out = _git(folder, *where, "ls-files", "-z", "--others", "--exclude-standard")
    if out is None:
        raise ConfigError(f"job.code: git cannot list {folder}", f"try: git -C {folder} status")
    yield from dict.fromkeys(os.fsdecode(name) for name in out.split(b"\0") if name)


def _git(folder: Path, *args: str) -> bytes | None:
    """What git prints; None where it fails. No configuration of a repository runs a program here."""
    safe = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"]
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *safe, *args],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _commit(folder: Path) -> tuple[str, bool]:
    """The commit that is checked out, and whether the folder differs from it; no commit where there is no git."""
    head = _git(folder, "rev-parse", "--verify", "-q", "HEAD") if shutil.which("git") else None
    if head is None:
        return "", False
    changed = _git(folder, "status", "--porcelain", "-z", "--", ".")
    return head.decode(errors="replace").strip()[:64], changed != b""


def _secret(name: str, include: Sequence[str]) -> str:
    """Why a file stays here: one of its parts has the name of a secret, and nobody asked for it."""
    if _matches(name, include):
        return ""
    hits = (p for part in name.split("/") for p in SECRETS if fnmatchcase(part.lower(), p))
    source = name.endswith((".py", ".pyi", ".md"))  # tokenizer.py holds no secret for its name
    broad = ("*secret*", "*token*")
    found = next((p for p in hits if not (p in broad and (source or "tokeniz" in name.lower()))), "")
    return f"looks like a secret: {found}" if found else ""


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern names the file, one of its folders, or its last name."""
    parts = name.split("/")
    heads = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatchcase(one, p.rstrip("/")) for p in patterns for one in (*heads, parts[-1]))


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise UnreadableError(f"job.code: cannot read {path}: {e.strerror}", "mend its rights, or exclude it") from e


def keep(tree: CodeTree, run_dir: Path) -> None:
    """Pack the tree beside the run's journal: what is changed here later changes nothing of the run.

    Raises UvccError for a file that was changed since it was surveyed, or where the disk refuses.
    """
    try:
        with (run_dir / ARCHIVE).open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as zipped:
            _pack(tree, zipped)
        (run_dir / RECORD).write_text(json.dumps(tree.record(), indent=1), encoding="utf-8")
    except OSError as e:
        raise UvccError(f"cannot pack job.code into {run_dir}: {e.strerror}", "free disk space") from e


def _pack(tree: CodeTree, into: gzip.GzipFile) -> None:
    with tarfile.open(fileobj=into, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for f in tree.files:
            data = (Path(tree.folder) / f.path).read_bytes()
            if hashlib.sha256(data).hexdigest() != f.sha256:
                raise UvccError(f"job.code: {f.path} was changed while it was packed", "try again")
            info = tarfile.TarInfo(f.path)
            info.size, info.mode = len(data), 0o755 if f.executable else 0o644
            tar.addfile(info, io.BytesIO(data))


def kept(run_dir: Path) -> CodeTree | None:
    """What :func:`keep` packed for a run; None where its job takes no code along. Raises UnreadableError."""
    path = run_dir / RECORD
    if not path.exists():
        return None
    try:
        found = as_object(path.read_bytes(), 64 << 20) or {}
        files = tuple(
            CodeFile(str(f["path"]), bool(f["executable"]), as_int(f["size"]) or 0, str(f["sha256"]))
            for f in found["files"]
        )
        left = tuple(map(str, found["left_out"]))
        return CodeTree(
            str(found["folder"]), str(found["sha256"]), files, str(found["commit"]), bool(found["dirty"]), left
        )
    except (OSError, KeyError, TypeError) as e:
        raise UnreadableError(f"cannot read {path}: {e}", "the run's folder is damaged; start a new run") from e
