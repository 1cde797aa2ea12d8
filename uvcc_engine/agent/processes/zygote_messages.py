"""What an agent asks of its zygote and what that reports: one JSON object per line, one frozen record per kind.

Both ends are of this package and of one version, yet either may be replaced while the other runs: :func:`parse_request`
and :func:`parse_report` answer for every line there is, with a record or with what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Final

from uvcc_engine.agent.processes.process import ProcessId
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.parsing.untrusted import as_object
from uvcc_engine.contract.run_files.records import Malformed

MOST_BYTES: Final = 1 << 24  # of a line: a spec carries its job


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """Fork this worker, its standard output and errors into the file ``log``."""

    spec: WorkerSpec
    log: str


@dataclass(frozen=True, slots=True)
class ImportsDone:
    """The zygote has imported what its workers share, and forks from now on.

    ``missing``: by module, why it cannot be imported. ``seconds`` is what the import took, ``threads`` how many there
    are at a fork. Versions are "" where there is none.
    """

    KIND: ClassVar[str] = "ready"
    missing: Mapping[str, str] = field(default_factory=dict)
    threads: int = 0
    seconds: float = 0.0
    torch: str = ""
    cuda: str = ""
    nccl: str = ""
    triton: str = ""

    def to_json(self) -> dict[str, Any]:
        """What consoles are told of it."""
        return {"ready": True, **asdict(self)}


@dataclass(frozen=True, slots=True)
class WorkerForked:
    """A worker of ``run`` leads a process group of its own and can be signalled; ``at``: before its fork (wall, s)."""

    KIND: ClassVar[str] = "started"
    run: str
    coord: str
    id: ProcessId
    at: float


@dataclass(frozen=True, slots=True)
class ForkFailed:
    """There is no such worker, and why."""

    KIND: ClassVar[str] = "failed"
    run: str
    coord: str
    error: str


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A forked process has ended; ``status`` as ``os.waitpid`` gives it."""

    KIND: ClassVar[str] = "exited"
    pid: int
    status: int


ZygoteReport = ImportsDone | WorkerForked | ForkFailed | WorkerExited
_KINDS: Final[Mapping[str, type[ZygoteReport]]] = {
    kind.KIND: kind for kind in (ImportsDone, WorkerForked, ForkFailed, WorkerExited)
}


def encode(message: ForkRequest | ZygoteReport) -> bytes:
    """A message as one line."""
    if isinstance(message, ForkRequest):
        found: dict[str, Any] = {"spec": message.spec.to_json(), "log": message.log}
    else:
        found = {"kind": message.KIND, **asdict(message)}
    return json.dumps(found).encode() + b"\n"


def parse_request(line: bytes) -> ForkRequest | Malformed:
    """What an agent asks for. Total."""
    found = as_object(line, MOST_BYTES)
    if found is None or set(found) != {"spec", "log"} or not isinstance(found["log"], str):
        return Malformed("a malformed request to fork")
    try:
        return ForkRequest(WorkerSpec.from_json(found["spec"]), found["log"])
    except UvccError as error:
        return Malformed(f"a request to fork a worker that is none: {error.what}")


def parse_report(line: bytes) -> ZygoteReport | Malformed:
    """What a zygote reports. Total."""
    found = as_object(line, MOST_BYTES)
    kind = found.pop("kind", None) if found is not None else None
    if not isinstance(kind, str) or kind not in _KINDS:
        return Malformed("a zygote's report of no known kind")
    try:
        return strict.read(_KINDS[kind], found, f"a zygote's report {kind!r}")
    except UvccError as error:
        return Malformed(error.what)
