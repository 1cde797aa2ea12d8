"""Names of events that only the console may use, of itself and in a run's log.

A pod writes its own ``events.jsonl``. If it could write ``verifier_ok`` or ``succession`` there, the run's log would
tell an auditor what no verifier said, and a resume would act on what no conductor decided.
"""

from __future__ import annotations

from typing import Final

JUDGEMENTS: Final = frozenset(
    {"verifier_ok", "verifier_failed", "proof_bundle_written", "dp_result_hashes", "dp_run_complete", "run_ended"}
)
"""Never an engine event of the console either: the run's log makes them of other events."""

RESERVED: Final = JUDGEMENTS | {
    "alert",
    "checkpoint_verified",
    "dp_config",
    "dp_master_port_selected",
    "dp_preflight_failed",
    "dp_preflight_ok",
    "exit",
    "fork_detected",
    "gate",
    "halt_ack",
    "halt_done",
    "halt_requested",
    "intent",
    "job_config",
    "node_bootstrap_done",
    "node_bootstrap_step",
    "open_final_result",
    "parties_launched",
    "party_done",
    "party_failed",
    "party_identity_keys_ready",
    "party_launched",
    "pod_active",
    "pod_created",
    "pod_creating",
    "pod_deleted",
    "pod_deleting",
    "pod_failed",
    "pod_lost",
    "pods_deleted",
    "privacy_relay_started",
    "quote",
    "rewind",
    "run_facts",
    "sid_job_selected",
    "stage",
    "succession",
    "unreadable_line",
}
EVENT: Final = "reserved_event"
"""What such a line of a pod becomes, with the name that it used in its fields."""
