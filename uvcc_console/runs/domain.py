"""Domain scope: one party's console, with that party's credentials only.

Each of the three domains has an order key of its own. Workers obey a halt that any of them signs; what needs the word
of several (``consent`` in a profile) is counted over their signatures. A domain's console sees the other domains by
what their workers publish at the relay: signed signs of life, never a shell, a pod's address or another's token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.paths import DOMAIN
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet.ssh_keys import KEY_FILE
from uvcc_console.halt import relay_path
from uvcc_console.runs import processes
from uvcc_console.runs.order import enrol
from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.rollout_phases import PHASES as PHASES
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.contract.run_files.files import checked_run_id, write_atomic
from uvcc_engine.transcript.signed import approvals, boxes
from uvcc_engine.transcript.signed.consents import label

DOMAIN: Final = DOMAIN
MOST_RELAYS: Final = 4096
TOLD: Final = ("job", "topology", "smoke", "consent")
HALT: Final = {"lease": 0.0, "auto": ["hold", "halt"]}


def order_keys(run_dir: Path, given: str = "") -> dict[str, str]:
    """Who may order a halt: name -> public key, the operator and the three domains; keys are made at first use."""
    found = {"operator": relay_path.order_key(run_dir, given)}
    found |= {f"P{party}": own_key(run_dir, party) for party in range(PARTIES)}
    (run_dir / relay_path.FOLDER).mkdir(exist_ok=True, mode=0o700)
    write_atomic(run_dir / relay_path.FOLDER / relay_path.SIGNERS, json.dumps(found).encode())
    return found


def own_key(run_dir: Path, party: int) -> str:
    """The public key of a domain of this run, made at first use: its pods sign what it approves."""
    folder = run_dir / "domains" / f"p{party}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return relay_path.order_key(folder)


def approve_policy(run_dir: Path, party: int, sha256: str) -> str:
    """The word of a run's own domain key for a policy: one operator gives it for all three, by this very code."""
    approval = approvals.Approval(of="policy", sha256=sha256, party=party, decision="approve")
    folder = run_dir / "domains" / f"p{party}"
    return approvals.signed(approval, relay_path.signer(folder, namespace=approvals.APPROVAL_NAMESPACE))


def readers(run_dir: Path, given: str = "") -> list[str]:
    """Who may read the workers' signs of life at the relay: public keys of the operator and of the three domains."""
    order_keys(run_dir, given)  # they are derived from these
    folders = [run_dir / "domains" / f"p{party}" for party in range(PARTIES)]
    ours = boxes.public_of(relay_path.reader(run_dir, given))
    return [ours, *(boxes.public_of(relay_path.reader(f)) for f in folders)]


def order_seal(run_dir: Path) -> str:
    """The key (hex) under which consoles and workers of this run exchange orders, made at first use."""
    path = run_dir / relay_path.FOLDER / relay_path.SEAL
    if not relay_path.seal_key(run_dir):
        path.parent.mkdir(exist_ok=True, mode=0o700)
        write_atomic(path, os.urandom(32).hex().encode(), mode=0o600)
    return relay_path.seal_key(run_dir).hex()


def signers(run_dir: Path) -> dict[str, str]:
    """The same as the rollout wrote it down; empty before there was a relay."""
    try:
        found = json_of((run_dir / relay_path.FOLDER / relay_path.SIGNERS).read_text())
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def export(run_dir: Path, s: Snapshot, party: int) -> dict[str, Any]:
    """Everything that the console of one domain needs, and nothing of the others that is secret.

    Raises ConfigError before the run has a relay, or for a run of one domain.
    """
    boxes = relay_path.mailboxes(run_dir, s.engine_run)
    if s.job_kind != "private" or not boxes:
        raise ConfigError(f"{s.run} has no relay for its domains", "link: relay in the profile, once a phase runs")
    if party not in range(PARTIES):
        raise ConfigError(f"there is no party {party}", "0, 1 or 2")
    names = ("pod", "party", "replica", "provider", "identity")
    return {
        "format": 1,
        "run": s.run,
        "party": party,
        "profile": {k: v for k, v in dict(s.profile).items() if k in ("job", "topology", "smoke", "consent")}
        | {"halt": HALT},
        "shape": [s.replicas, s.pipeline_stages, s.tensor],
        "phase": [s.phase, s.engine_run, s.steps_planned, s.sid_job],
        "pods": [{name: getattr(pod, name) for name in names} for pod in s.pods.values()],
        "relays": [
            {
                "url": box.url,
                "group": box.group,
                "token": box.tokens[party],
                "ca": Path(box.ca_file).read_text() if box.ca_file else "",
            }
            for box in boxes
        ],
        "order_key": (run_dir / "domains" / f"p{party}" / KEY_FILE).read_text(),
        "signers": signers(run_dir),
        "seal": relay_path.seal_key(run_dir).hex(),
    }


def join(document: Mapping[str, Any]) -> Path:
    """Make the run folder of a domain's console from what was exported to it. Raises UnreadableError.

    Joining again, for a later phase of the same run, goes on in the same folder.
    """
    try:
        return _join(document)
    except (KeyError, ValueError, TypeError, IndexError, ConfigError) as e:
        why = f"it has no {e}" if isinstance(e, KeyError) else str(e)
        raise UnreadableError(f"not a domain's file: {why}", "uvcc domain export RUN --party P writes one") from e


def _join(document: Mapping[str, Any]) -> Path:
    party, run = int(document["party"]), checked_run_id(str(document["run"]))
    if party not in range(PARTIES) or len(document["relays"]) > MOST_RELAYS:
        raise ValueError(f"party {party}, {len(document['relays'])} relays")
    phase, engine_run, steps, sid = document["phase"]
    checked_run_id(str(engine_run))
    if phase not in PHASES:
        raise ValueError(f"no phase {phase!r}")
    run_dir = paths.run_dir(f"{run}-p{party}")
    folder = run_dir / relay_path.FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(run_dir / KEY_FILE, str(document["order_key"]).encode(), mode=0o600)
    write_atomic(folder / relay_path.SIGNERS, json.dumps(document["signers"]).encode())
    if seal := bytes.fromhex(str(document.get("seal", ""))):
        write_atomic(folder / relay_path.SEAL, seal.hex().encode(), mode=0o600)
    for number, at in enumerate(document["relays"]):
        name = f"{phase}-{number}"
        write_atomic(folder / f"{name}.json", json.dumps([at["token"]]).encode(), mode=0o600)
        if at["ca"]:
            write_atomic(folder / f"{name}.pem", str(at["ca"]).encode())
        where = {"url": at["url"], "group": at["group"], "engine_run": engine_run, "tokens": f"{name}.json"}
        write_atomic(
            folder / f"{name}{relay_path.AT}", json.dumps({**where, "ca": f"{name}.pem" if at["ca"] else ""}).encode()
        )
    if fresh := not (run_dir / DOMAIN).exists():
        enrol(run_dir)
    write_atomic(run_dir / DOMAIN, json.dumps({"run": run, "party": party}).encode())
    journal = Journal(run_dir / processes.JOURNAL, source="domain")
    try:
        if fresh:
            journal.append(_created(run_dir.name, document), *(_pod(p) for p in document["pods"]))
        journal.append(
            ev.PhaseStarted(phase=str(phase), engine_run=str(engine_run), steps=int(steps), sid_job=str(sid))
        )
    finally:
        journal.close()
    return run_dir


def _created(name: str, document: Mapping[str, Any]) -> ev.Event:
    replicas, stages, tensor = document["shape"]
    return ev.RunCreated(
        run=name,
        profile_name=f"domain P{document['party']}",
        job_kind="private",
        replicas=int(replicas),
        pipeline_stages=int(stages),
        tensor=int(tensor),
        stages=list(PHASES),
        profile=dict(document["profile"]),
    )


def _pod(known: Mapping[str, Any]) -> ev.Event:
    return ev.PodChanged(
        pod=str(known["pod"]),
        party=int(known["party"]),
        replica=int(known["replica"]),
        provider=str(known["provider"]),
        state="agent",
        identity=str(known["identity"]),
    )


def consents(s: Snapshot, what: str) -> set[str]:
    """The domains that signed for this; for a resume, for the one that would come next."""
    wanted = label(what, s.resumes + 1)
    return {by for done, by in s.consents if done == wanted}


def missing(s: Snapshot, what: str) -> str:
    """Why this may not be done yet; empty once as many domains have signed as the profile wants."""
    part = s.profile.get("consent")
    wanted = int(part.get(what, 0)) if isinstance(part, Mapping) else 0
    given = consents(s, what)
    if len(given) >= wanted:
        return ""
    who = ", ".join(sorted(given)) or "nobody"
    return f"{label(what, s.resumes + 1)} needs the signatures of {wanted} of {PARTIES} domains; signed by {who}"
