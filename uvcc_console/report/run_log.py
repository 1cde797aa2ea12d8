"""The journal as a run log that people and scripts read: ``[ts] EVENT name {json}`` lines, and the same as JSON lines.

Names that the runbooks look for keep their spelling (``dp_preflight_ok``, ``dp_result_hashes``, ``verifier_ok``...).
``verifier_ok`` is written for a proof bundle alone, with the certificate's values; what pods report says so (``mark``).
Heartbeats, metrics, prices and plain log lines are left to their own files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.core.answers.shown import NOT_VERIFIED, VERIFIED
from uvcc_console.core.events import reserved
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.parsing.untrusted import without_nan

_POD_EVENTS: Final = {
    "creating": "pod_creating",
    "booting": "pod_created",
    "ready": "pod_active",
    "agent": "node_bootstrap_done",
    "lost": "pod_lost",
    "deleting": "pod_deleting",
    "gone": "pod_deleted",
    "failed": "pod_failed",
}
_SECRET_KEYS: Final = ("token", "api_key", "apikey", "private_key", "privkey", "password", "secret")
_HARMLESS_ENDS: Final = ("_file", "_path", "tokens", "toks_per_s")


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One line of the run log."""

    ts: float
    name: str
    fields: Mapping[str, Any]


def is_secret_key(key: str) -> bool:
    """Whether a field of this name is left out of every report."""
    low = key.lower()
    return any(s in low for s in _SECRET_KEYS) and not low.endswith(_HARMLESS_ENDS)


def without_secrets(value: Any) -> Any:
    """``value`` less every field that is named like a secret."""
    if isinstance(value, Mapping):
        return {k: without_secrets(v) for k, v in value.items() if not is_secret_key(str(k))}
    if isinstance(value, (list, tuple)):
        return [without_secrets(v) for v in value]
    return value


class Translator:
    """Turns journal events into run-log events; remembers pods and result hashes on the way."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._pods: dict[str, ev.PodChanged] = {}
        self._reported: dict[str, dict[str, str]] = {}
        self._certified: dict[str, list[str]] = {}
        self._replicas: dict[str, int] = {}
        self._by_type: dict[type[ev.Event], Callable[[Any], Iterator[tuple[str, dict[str, Any]]]]] = {
            ev.RunCreated: self._created,
            ev.PodChanged: self._pod,
            ev.PhaseStarted: self._phase,
            ev.EngineEvent: self._engine,
            ev.WorkerProcess: self._worker,
            ev.RootReported: self._root,
            ev.ResultReported: self._result,
            ev.PhaseVerdict: self._verdict,
            ev.RunEnded: self._ended,
        }
        for kind, name in (
            (ev.StageChanged, "stage"),
            (ev.GateMeasured, "gate"),
            (ev.LinkChanged, "link"),
            (ev.ForkDetected, "fork_detected"),
            (ev.HaltRequested, "halt_requested"),
            (ev.HaltAck, "halt_ack"),
            (ev.HaltDone, "halt_done"),
            (ev.Alert, "alert"),
            (ev.Intent, "intent"),
        ):
            self._by_type[kind] = partial(_as_it_is, name)

    def translate(self, events: Iterable[ev.Event]) -> Iterator[LogEvent]:
        """Run-log events, in order."""
        for event in events:
            act = self._by_type.get(type(event))
            if act is not None:
                for name, fields in act(event):
                    yield LogEvent(event.ts, name, without_secrets(fields))

    def _created(self, e: ev.RunCreated) -> Iterator[tuple[str, dict[str, Any]]]:
        size = {"replicas": e.replicas, "stages": e.pipeline_stages, "tensor": e.tensor}
        smoke = e.profile.get("smoke")
        fewer = smoke.get("replicas", e.replicas) if isinstance(smoke, Mapping) else e.replicas
        self._replicas = {"": e.replicas, "smoke": min(e.replicas, int(fewer))}
        yield "dp_config", {"run": e.run, "profile": e.profile_name, **size}
        job = e.profile.get("job")
        yield "job_config", {"kind": e.job_kind, **(job if isinstance(job, Mapping) else {})}

    def _pod(self, e: ev.PodChanged) -> Iterator[tuple[str, dict[str, Any]]]:
        before, self._pods[e.pod] = self._pods.get(e.pod), e
        name = _POD_EVENTS.get(e.state)
        if name is None:
            return
        again = before is not None and before.state == "booting" == e.state
        if e.detail and (again or e.state == "ready"):
            name = "node_bootstrap_step"  # the pod has been there, or active, since that was first told
        fields = {"party_id": e.party, "replica_id": e.replica, "pod_id": e.pod, "provider_type": e.provider}
        yield name, {**fields, "address": e.address, "detail": e.detail}
        if e.state == "agent" and e.identity:
            yield "party_identity_keys_ready", {"parties": [{"party_id": e.party, "address": e.identity}]}

    def _phase(self, e: ev.PhaseStarted) -> Iterator[tuple[str, dict[str, Any]]]:
        if e.sid_job:
            yield "sid_job_selected", {"phase": e.phase, "sid_job_hex": f"0x{e.sid_job}"}
        launched = {"phase": e.phase, "engine_run": e.engine_run, "steps": e.steps, "attempt": e.attempt}
        replicas = self._replicas.get(e.phase, self._replicas.get("", 1))
        count = sum(pod.replica < replicas for pod in self._pods.values())
        yield "parties_launched", {"count": count, **launched}

    def _engine(self, e: ev.EngineEvent) -> Iterator[tuple[str, dict[str, Any]]]:
        pod = self._pods.get(e.pod)
        who = {"party_id": pod.party, "replica_id": pod.replica} if pod else {}
        name, fields = e.event, e.fields
        if name in reserved.JUDGEMENTS:
            name, fields = reserved.EVENT, {"event": name, "fields": fields}
        elif name == "protocol_error" and fields.get("dropped"):
            name = "frame_rejected"  # its sender sends it again: nothing ended
        yield name, {**who, "pod_id": e.pod, "level": e.level, **fields}

    def _worker(self, e: ev.WorkerProcess) -> Iterator[tuple[str, dict[str, Any]]]:
        who = {**_party_of(e.coord), "coord": e.coord, "pod_id": e.pod}
        if e.state != "exited":
            yield "party_launched", {**who, "pid": e.pid}
        elif e.rc == 0:
            yield "party_done", who
        else:
            yield "party_failed", {**who, "rc": e.rc, "signal": e.signal}

    def _root(self, e: ev.RootReported) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "epoch_root", {"coord": e.coord, "epoch": e.epoch, "epoch_root_hex": f"0x{e.root}"}

    def _result(self, e: ev.ResultReported) -> Iterator[tuple[str, dict[str, Any]]]:
        self._reported.setdefault(e.phase, {})[e.coord] = e.result_hash
        fields = {"coord": e.coord, "phase": e.phase, "result_hash32_hex": f"0x{e.result_hash}", "values": e.values}
        yield "open_final_result", {**fields, "pod_id": e.pod, "mark": NOT_VERIFIED}

    def _verdict(self, e: ev.PhaseVerdict) -> Iterator[tuple[str, dict[str, Any]]]:
        path = self._relative(e.bundle)
        if not e.ok:
            hashes = sorted({f"0x{h}" for h in self._reported.get(e.phase, {}).values()})
            yield "dp_result_hashes", {"phase": e.phase, "unique_hashes": hashes, "mark": NOT_VERIFIED}
            yield "verifier_failed", {"phase": e.phase, "proof_bundle_path": path, "detail": e.detail}
            return
        hashes = self._certified[e.phase] = [f"0x{h}" for h in e.result_hashes]
        yield "dp_result_hashes", {"phase": e.phase, "unique_hashes": hashes, "mark": VERIFIED}
        yield "proof_bundle_written", {"phase": e.phase, "path": path}
        roots = {"global_root_hex": f"0x{e.global_root}", "sid_job_hex": f"0x{e.sid_job}"}
        what = {"level": e.level, "identities_pinned": e.pinned, "result_hashes": hashes, "values": e.values}
        yield "verifier_ok", {"phase": e.phase, "proof_bundle_path": path, **roots, **what}

    def _ended(self, e: ev.RunEnded) -> Iterator[tuple[str, dict[str, Any]]]:
        if e.status == "ok":
            yield "dp_run_complete", self._outcome()
        if not e.leaks and all(p.state == "gone" for p in self._pods.values()):
            yield "pods_deleted", {"keep_pods": False, "count": len(self._pods)}
        yield "run_ended", {"status": e.status, "detail": e.detail, "leaks": e.leaks}

    def _outcome(self) -> dict[str, Any]:
        """The result of the last phase that has one: the certificate's, else what was reported."""
        phase = next(iter(reversed([*self._reported, *self._certified])), "")
        if phase in self._certified:
            last, mark = self._certified[phase], VERIFIED
        else:
            last, mark = sorted({f"0x{h}" for h in self._reported.get(phase, {}).values()}), NOT_VERIFIED
        return {"phase": phase, "result_hash32_hex": last[0] if len(last) == 1 else last, "mark": mark}

    def _relative(self, path: str) -> str:
        """Paths below the run folder are named from there: reports do not tell where the operator keeps them.

        A run folder may have been moved since: the artifacts' own part of the path says the same.
        """
        found = Path(path)
        if found.is_relative_to(self._run_dir):
            return str(found.relative_to(self._run_dir))
        parts = found.parts
        return str(Path(*parts[parts.index("artifacts") :])) if "artifacts" in parts else found.name


def _as_it_is(name: str, e: ev.Event) -> Iterator[tuple[str, dict[str, Any]]]:
    yield name, ev.to_json(e)


def _party_of(coord: str) -> dict[str, Any]:
    try:
        found = Coord.parse(coord)
    except ConfigError:
        return {}
    return {"party_id": found.party, "replica_id": found.replica}


def stamp(ts: float) -> str:
    """UTC with milliseconds."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(ts))}.{int(ts * 1000) % 1000:03d}Z"


def human(events: Iterable[LogEvent]) -> str:
    """``run_full.log``."""
    return "".join(f"[{stamp(e.ts)}] EVENT {e.name} {_dump(e.fields)}\n" for e in events)


def machine(events: Iterable[LogEvent]) -> str:
    """``run_full.jsonl``: ``{"ts", "t_rel_s", "event", "fields"}``."""
    lines, first = [], None
    for e in events:
        first = e.ts if first is None else first
        record = {"ts": stamp(e.ts), "t_rel_s": round(e.ts - first, 3), "event": e.name, "fields": dict(e.fields)}
        lines.append(_dump(record) + "\n")
    return "".join(lines)


def _dump(value: Any) -> str:
    return json.dumps(without_nan(value), sort_keys=True, separators=(",", ":"), default=str)
