"""The names of engine events: what ``events.jsonl`` may say, what each is about, and what it means.

A trainer of another kind may write names of its own; the console shows them and decides nothing by them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple


class Area(StrEnum):
    """What an event is about."""

    RUN = "run"
    LINK = "link"  # between parties, or between ranks of one party
    CHECKPOINT = "checkpoint"
    HALT = "halt"
    EVIDENCE = "evidence"
    AGENT = "agent"


class EventName(NamedTuple):
    """An event's area and its meaning."""

    area: Area
    means: str


NAMES: Final[dict[str, EventName]] = {
    # run
    "party_start": EventName(Area.RUN, "a worker starts its first step, or goes on at a later one"),
    "policy_accepted": EventName(Area.RUN, "a worker checked the signed policy and its own part of it"),
    "worker_start": EventName(Area.RUN, "a worker process began"),
    "environment_proven": EventName(Area.RUN, "what the environment sets was read back where it acts, in this rank"),
    "resumed": EventName(Area.RUN, "a worker went on from a checkpoint"),
    "taken_over": EventName(Area.RUN, "a worker went on from the checkpoint of another policy"),
    "handed_over": EventName(Area.RUN, "a worker handed its shares of a checkpoint to the pods of another policy"),
    "run_done": EventName(Area.RUN, "a worker finished the last step"),
    "run_failed": EventName(Area.RUN, "a worker ends in an error"),
    "open_final_done": EventName(Area.RUN, "the result was opened as the policy allows"),
    "steps_repeated": EventName(Area.RUN, "a resumed training came to where it had been, the same or not"),
    "step_skipped": EventName(Area.RUN, "a gradient was not a number and was not applied"),
    "rolled_back": EventName(Area.RUN, "what was not a number sent the training back to its last checkpoint"),
    "sample_written": EventName(Area.RUN, "the finished language model wrote a text"),
    "sink_failed": EventName(Area.RUN, "figures did not all reach a service that the training tells of them"),
    "weights_taken": EventName(Area.RUN, "the training begins with another one's weights"),
    "batch_answered": EventName(Area.RUN, "a served model answered a batch of queries"),
    "queries_refused": EventName(Area.RUN, "queries were dropped: by a stranger, repeated, of another form, too many"),
    "queries_stuck": EventName(Area.RUN, "queries or answers of a served model do not get through the relay"),
    "watchdog_dump": EventName(Area.RUN, "a worker stalled and left its stacks"),
    # links
    "link_up": EventName(Area.LINK, "a peer was proven and can be reached"),
    "link_down": EventName(Area.LINK, "the way to a peer was lost"),
    "link_choice": EventName(Area.LINK, "a way to a peer was chosen, or changed"),
    "waiting": EventName(Area.LINK, "a worker waits long for a message"),
    "peer_lost": EventName(Area.LINK, "a peer gave no sign of life for longer than agreed"),
    "protocol_error": EventName(Area.LINK, "a peer broke the protocol"),
    "connections_rejected": EventName(Area.LINK, "connections of strangers were turned away"),
    "faults_injected": EventName(Area.LINK, "what the injected faults of a rehearsal did"),
    "plane_counters": EventName(Area.LINK, "what the message plane has counted so far"),
    "relay_up": EventName(Area.LINK, "the relay answers again"),
    "relay_down": EventName(Area.LINK, "the relay does not answer"),
    "relay_moved": EventName(Area.LINK, "the relay of the run is elsewhere now"),
    "relay_refused": EventName(Area.LINK, "the relay did not take messages"),
    "relay_expired": EventName(Area.LINK, "a message was never taken by its receiver"),
    "dp_ready": EventName(Area.LINK, "the groups of a party's replicas are up"),
    "dp_ok": EventName(Area.LINK, "gradients of all replicas were summed for the first time"),
    "group_ready": EventName(Area.LINK, "a process group is up"),
    "group_close": EventName(Area.LINK, "a process group ended because of an error"),
    "uid_wait": EventName(Area.LINK, "a rank waits for the others of its group"),
    "pipeline_tick": EventName(Area.LINK, "one pass of a pipeline stage"),
    # checkpoints
    "checkpoint_written": EventName(Area.CHECKPOINT, "a worker's checkpoint is on its disk"),
    "checkpoint_committed": EventName(Area.CHECKPOINT, "all three parties signed a checkpoint"),
    "checkpoint_refused": EventName(Area.CHECKPOINT, "a checkpoint does not verify and is not used"),
    "checkpoints_set_aside": EventName(Area.CHECKPOINT, "later checkpoints were moved aside: an earlier one counts"),
    # halts
    "held": EventName(Area.HALT, "a worker holds between two steps"),
    "released": EventName(Area.HALT, "a worker goes on after a hold"),
    "halted": EventName(Area.HALT, "a worker halted with a checkpoint"),
    "order_obeyed": EventName(Area.HALT, "a worker obeyed a signed order that came over the relay"),
    # evidence
    "epoch_root": EventName(Area.EVIDENCE, "a worker finalised an epoch of its transcript"),
    "proof_failed": EventName(Area.EVIDENCE, "the proof of a step's products does not hold: nothing of it is revealed"),
    "training_ended_early": EventName(Area.RUN, "the revealed validation loss had not fallen for job.patience times"),
    "metric_not_defined": EventName(Area.RUN, "a metric that the job reveals came out as no number"),
    "evidence_replayed": EventName(Area.EVIDENCE, "a worker replayed its transcript before it went on"),
    # of agents
    "lease_expired": EventName(Area.AGENT, "no console renewed the lease: the pod halts its runs by itself"),
    "worker_died": EventName(Area.AGENT, "a worker ended without saying so"),
    "relay_died": EventName(Area.AGENT, "the relay on this pod ended and is not started again"),
    "relay_restarted": EventName(Area.AGENT, "the relay on this pod ended and was started again"),
}


def area_of(name: str) -> Area | None:
    """What an event is about; None for a name that the engine does not know."""
    found = NAMES.get(name)
    return found.area if found is not None else None
