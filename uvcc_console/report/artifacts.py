"""The files that a run hands over, written from the journal and from what was fetched.

For the whole run: ``run_full.log``, ``run_full.jsonl``, ``dp_layout.json``. For each phase, beside its proof bundle:
``dp_roots.json``, ``dp_matrix.md``, ``roots_by_coord.json``, ``audit_bundle.json``, and ``allowed_signers`` with the
identities that the pods showed over SSH. Hashes are written ``0x...``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from uvcc_console.core import events as ev
from uvcc_console.core.log import logger
from uvcc_console.core.snapshot import PodView
from uvcc_console.report import collector
from uvcc_console.report.metrics import group_inits
from uvcc_console.report.record import ARTIFACTS, RunRecord, address
from uvcc_console.report.run_log import Translator, human, machine, stamp
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.files import log_name
from uvcc_engine.transcript.proof import derived_files
from uvcc_engine.transcript.proof.bundle import Bundle
from uvcc_engine.transcript.proof.derived_files import audit_bundle, dp_matrix, dp_roots
from uvcc_engine.transcript.proof.package import LAYOUT, RUN_EVENTS, RUN_LOG
from uvcc_engine.transcript.signing.sshsig import write_allowed_signers

log = logger(__name__)

SIGNERS = "allowed_signers"


def write_artifacts(
    run_dir: Path, clock: Callable[[], float] = time.time, record: RunRecord | None = None
) -> list[Path]:
    """Write every artifact of a run; returns the files, all below ``run_dir/artifacts``.

    Run logs only ever grow: if a log on disk is no beginning of the new one, it is kept under a dated name.
    Where the run's manifest was signed already, it is renewed. ``record``: the run, if it was read already.

    Raises UnreadableError without a journal, UvccError if
    the disk refuses, VerificationError naming a file that was changed since the manifest was signed.
    """
    record = record or RunRecord.load(run_dir)
    folder = run_dir / ARTIFACTS
    key = collector.public_line()
    with collector.renewing(run_dir) as made:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            entries = list(Translator(run_dir).translate(record.events))
            made += append_only(folder / RUN_LOG, human(entries), clock)
            made += append_only(folder / RUN_EVENTS, machine(entries), clock)
            made.append(_json(folder / LAYOUT, layout(record)))
            for phase, bundle in record.bundles.items():
                home = folder / phase
                made.append(_json(home / derived_files.DP_ROOTS, dp_roots(bundle)))
                made.append(_text(home / derived_files.DP_MATRIX, dp_matrix(bundle, stamp(clock()))))
                made.append(_json(home / derived_files.BY_COORD, roots_by_coord(record, phase, bundle)))
                made.append(_json(home / derived_files.AUDIT, audit_bundle(bundle)))
                if signers := record.signers(phase):
                    write_allowed_signers(home / SIGNERS, signers, key)
                    made.append(home / SIGNERS)
        except OSError as e:
            raise UvccError(f"cannot write the artifacts of {run_dir.name}: {e}", "free disk space and repeat") from e
    log.info("%d artifacts are written", len(made), run=run_dir.name)
    return made


def append_only(path: Path, text: str, clock: Callable[[], float]) -> list[Path]:
    """Write a log that may only grow; returns it, and where what lay there is kept if it was no beginning of it."""
    data = text.encode()
    old = path.read_bytes() if path.exists() else b""
    if data.startswith(old):
        with path.open("ab") as out:
            out.write(data[len(old) :])
        return [path]
    kept = path.with_suffix(f".{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(clock()))}{path.suffix}")
    path.rename(kept)
    log.warning("%s was no beginning of what the journal tells; it is kept as %s", path.name, kept.name)
    path.write_bytes(data)
    return [path, kept]


def _text(path: Path, text: str) -> Path:
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text)
    os.replace(temporary, path)
    return path


def _json(path: Path, value: Any) -> Path:
    return _text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def _hex(data: bytes) -> str:
    return f"0x{data.hex()}"


def layout(record: RunRecord) -> dict[str, Any]:
    """``dp_layout.json``: pods, providers by party; of each phase its size, links, relays, masters and backends."""
    nodes, providers = [], {}
    for pod in record.pods:
        user, host, port = address(pod)
        providers[str(pod.party)] = pod.provider
        where = {"ssh_user": user, "ssh_host": host, "ssh_port": port}
        who = {"party_id": pod.party, "replica_id": pod.replica, "provider_type": pod.provider, "pod_id": pod.pod}
        nodes.append({**who, **where})
    phases = {phase: _phase_layout(record, phase) for phase in record.phases}
    size = record.size
    return {
        "generated_ts": stamp(max(record.snapshot.updated, 0.0)),
        "run": record.snapshot.run,
        "replicas": size.replicas,
        "stages": size.stages,
        "tensor": size.tensor,
        "providers_by_party": providers,
        "phases": phases,
        "nodes": nodes,
    }


def _phase_layout(record: RunRecord, phase: str) -> dict[str, Any]:
    """One phase as it really ran: which link carried whom, over which relays, and what carried the groups."""
    part = record.during(phase)
    size = record.size_of(phase)
    used: dict[tuple[str, int], str] = {}
    for event in part.engine_events("link_up", "link_choice"):
        peer, kind = event.fields.get("peer"), str(event.fields.get("kind", ""))
        if isinstance(peer, int) and not (kind == "auto" and (event.pod, peer) in used):
            used[event.pod, peer] = kind
    links = [{"pod_id": pod, "peer_party": peer, "kind": kind} for (pod, peer), kind in sorted(used.items())]
    relays = {
        int(e.fields.get("replica", 0)): {k: v for k, v in e.fields.items() if k not in ("phase", "level")}
        for e in record.engine_events("privacy_relay_started")
        if e.fields.get("phase") == phase
    }
    masters = {
        int(e.fields.get("party", -1)): {k: v for k, v in e.fields.items() if k != "phase"}
        for e in record.engine_events("dp_master_port_selected")
        if e.fields.get("phase") == phase
    }
    backends: dict[str, set[str]] = {}
    for init in group_inits(part):
        backends.setdefault(init.group, set()).add(init.backend)
    return {
        "replicas": size.replicas,
        "stages": size.stages,
        "tensor": size.tensor,
        "link_kinds": sorted(set(used.values())),
        "links": links,
        "relays": [relays[r] for r in sorted(relays)],
        "dp_masters": [masters[p] for p in sorted(masters)],
        "group_backends": {group: sorted(found) for group, found in sorted(backends.items())},
    }


def _there(home: Path, pod: PodView | None, name: str) -> str:
    """The name of a pod's file if it came home and says anything; an index does not point at nothing."""
    path = home / (pod.pod if pod else "") / name
    return name if path.is_file() and path.stat().st_size else ""


def _exit_of(home: Path, pod: PodView | None, coord: str) -> str:
    """Which of a pod's exit documents is this worker's: the ranks of a pod have one each."""
    for path in sorted((home / pod.pod).glob(files.EXITS)) if pod else ():
        try:
            found = json_of(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(found, dict) and found.get("coord") == coord:
            return path.name
    return ""


def roots_by_coord(record: RunRecord, phase: str, bundle: Bundle) -> list[dict[str, Any]]:
    """``roots_by_coord.json``: every worker with its pod and its root of the last epoch."""
    pods = {e.coord: e.pod for e in record.during(phase).of(ev.WorkerProcess) if e.pod}
    home = record.artifacts / phase
    size = bundle.policy.topology
    found = []
    for worker in bundle.workers:
        c = worker.coord
        pod = record.snapshot.pods.get(pods.get(str(c), ""))
        found.append(
            {
                "party": c.party,
                "replica": c.replica,
                "stage": c.stage,
                "tp": c.tensor,
                "local_rank": size.local_rank(c),
                "pod_id": pod.pod if pod else "",
                "ssh_host": address(pod)[1] if pod else "",
                "remote_log": _there(home, pod, log_name(str(c))),
                "remote_done": _exit_of(home, pod, str(c)),
                "epoch": worker.roots[-1][1].root.epoch,
                "epoch_root_hex": _hex(worker.roots[-1][1].root.root),
            }
        )
    return found
