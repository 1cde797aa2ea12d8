"""What happened, in the words of the field: one sentence for an engine event, and beside it what is a pod's own.

The sentence is the same for every pod that says the same, so that a screen can show it once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from uvcc_engine.contract.parsing.untrusted import as_float, as_int, scalar_text
from uvcc_engine.contract.run_files.event_names import NAMES
from uvcc_engine.contract.text import counted

_DIGEST: Final = 12
_OWN: Final = frozenset(
    ("sha256", "checkpoint", "root", "nonce", "coord", "party", "rank", "pid", "bytes", "seconds", "path", "digest")
)
"""Fields that differ from pod to pod, or name a long hash: beside the sentence, not in it."""
Fields = Mapping[str, Any]


def _peer(f: Fields) -> str:
    peer = scalar_text(f.get("peer", f.get("party")))
    return f"P{peer}" if peer.isdecimal() else peer or "a peer"


def _at(f: Fields) -> str:
    step = scalar_text(f.get("step"))
    return f" at step {step}" if step else ""


def halt_words(verified: int, total: int, step: int, others: str = "") -> str:
    """What a halt ended with: ``3/3 verified at step 17``. ``others``: what is said of those that are not. Of no pod
    is a step known where none ended with one.
    """
    at = f" at step {step}" if step >= 0 else ""
    return f"{verified}/{total} verified{others}{at}" if total else "before any worker began"


def _error(f: Fields) -> str:
    return ": ".join(["worker ends in an error", *(t for t in (scalar_text(f.get("error", f.get("what"))),) if t)])


def _proof_failed(f: Fields) -> str:
    """Who lied, as far as the second round told this party and all of them."""
    named = scalar_text(f.get("named"))
    listed = f.get("pair") if named or not _of_two(f.get("open_to")) else f.get("open_to")
    who = named or " or ".join(map(scalar_text, listed if isinstance(listed, list) else [])) or "a party"
    return f"a proof failed{_at(f)}: {who} lied; nothing of the step was revealed"


def _of_two(listed: object) -> bool:
    return isinstance(listed, list) and len(listed) == 2


def _quoted(f: Fields) -> str:
    pods = f.get("pods")
    many = len(pods) if isinstance(pods, list) else 0
    hourly, most = as_float(f.get("hourly")) or 0.0, as_float(f.get("at_most")) or 0.0
    return f"{many} pod{'s' * (many != 1)} for ${hourly:.2f}/h, ${most:.2f} at most"


def _seconds(f: Fields, name: str) -> str:
    value = as_float(f.get(name))
    return f" for {value:.1f} s" if value is not None else ""


def _sink_failed(f: Fields) -> str:
    name = scalar_text(f.get("sink")) or "a sink"
    reason = (
        scalar_text(f.get("error")) or f"{scalar_text(f.get('dropped')) or 'some'} rows came faster than it took them"
    )
    return f"{name} has not all figures: {reason}; the training goes on without it"


def repeats_exactly(f: Fields) -> bool:
    """Whether ``steps_repeated`` says that losses or tensors were compared, and that none differs."""
    compared = as_int(f.get("rows"), 1) is not None or as_int(f.get("checkpoint"), 0) is not None
    return compared and f.get("differs") == -1


def _rolled_back(f: Fields) -> str:
    left, times = scalar_text(f.get("left")), as_int(f.get("times")) or 1
    again = f", for the {times}th time" if times > 1 else ""
    why = f": {scalar_text(f.get('error'))}" if f.get("error") else ""
    return f"went back from step {left} to the checkpoint of step {scalar_text(f.get('step'))}{again}{why}"


def _repeated(f: Fields) -> str:
    first, last, rows = (as_int(f.get(name), 0) or 0 for name in ("first", "last", "rows"))
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    what = "rollback" if f.get("after") else "resume"
    if not repeats_exactly(f):
        differs = as_int(f.get("differs"), 0)
        found = f"step {differs} came out differently" if differs is not None else "nothing shows that it is the same"
        return f"the {what} is not exact: {found} when {steps} were repeated"
    losses = f"the same {counted(rows, 'loss', 'losses')}" if rows else ""
    at = as_int(f.get("checkpoint"), 0)
    tensors = f"the same tensors at step {at}" if at is not None else ""
    return f"the {what} is exact: {steps} again, with {' and '.join(filter(None, (losses, tensors)))}"


def _why(f: Fields) -> str:
    why = scalar_text(f.get("why"))
    return f": {why}" if why else ""


def _relay_started(f: Fields) -> str:
    """Where the workers of a replica meet, with the scheme that tells whether TLS is on."""
    at = scalar_text(f.get("relay_url_public") or f.get("relay_url_local"))
    replica = f" replica {scalar_text(f.get('replica'))}" if f.get("replica") else ""
    return f"relay started for {scalar_text(f.get('phase')) or 'the run'}{replica}" + (f" at {at}" if at else "")


# event -> (the fields that its sentence uses, the sentence)
_SENTENCES: Final[Mapping[str, tuple[tuple[str, ...], Callable[[Fields], str]]]] = {
    "party_start": (("step", "attempt"), lambda f: f"training starts{_at(f)}"),
    "policy_accepted": ((), lambda f: "the signed policy is accepted"),
    "worker_start": (("run", "world"), lambda f: "worker process started"),
    "environment_proven": (("values",), lambda f: "what the environment sets was read back where it acts"),
    "resumed": (("step",), lambda f: f"resumed from the checkpoint of step {scalar_text(f.get('step'))}"),
    "faults_injected": ((), lambda f: "faults injected, as the rehearsal asks"),
    "uid_wait": ((), lambda f: "waits for the other ranks of its group"),
    "group_close": ((), lambda f: "process group closed by an error"),
    "relay_died": (("why",), lambda f: f"the relay on this pod has died, and is not started again{_why(f)}"),
    "relay_restarted": (("why",), lambda f: f"the relay on this pod had died, and was started again{_why(f)}"),
    "training_ended_early": ((), lambda f: "ends early: the validation loss does not fall any more"),
    "run_done": (("step",), lambda f: f"last step done{_at(f)}"),
    "open_final_done": ((), lambda f: "the result is opened as the policy allows"),
    "sample_written": (("text",), lambda f: f"the model writes: {scalar_text(f.get('text'))}"),
    "weights_taken": (
        ("folder", "sha256"),
        lambda f: f"begins with the weights {scalar_text(f.get('sha256'))[:12]} of {scalar_text(f.get('folder'))}",
    ),
    "sink_failed": (("sink", "error", "dropped"), _sink_failed),
    "steps_repeated": (("first", "last", "rows", "checkpoint", "differs", "after"), _repeated),
    "step_skipped": (("step",), lambda f: f"update skipped, the gradient was not a number{_at(f)}"),
    "rolled_back": (("step", "left", "times", "error"), _rolled_back),
    "watchdog_dump": ((), lambda f: "stalled: the watchdog wrote the stacks"),
    "link_up": (("peer", "kind"), lambda f: f"link to {_peer(f)} up ({scalar_text(f.get('kind')) or 'direct'})"),
    "link_down": (("peer", "kind"), lambda f: f"link to {_peer(f)} down ({scalar_text(f.get('kind')) or 'direct'})"),
    "waiting": (("peer", "since_s", "why"), lambda f: f"waits for {_peer(f)}{_seconds(f, 'since_s')}{_why(f)}"),
    "peer_lost": (("peer", "party", "since_s"), lambda f: f"peer {_peer(f)} lost, silent{_seconds(f, 'since_s')}"),
    "relay_up": ((), lambda f: "relay reachable again"),
    "relay_down": (("why",), lambda f: f"relay unreachable{_why(f)}"),
    "dp_ready": ((), lambda f: "data-parallel groups ready"),
    "dp_ok": ((), lambda f: "first all-reduce over all replicas done"),
    "group_ready": ((), lambda f: "process group ready"),
    "checkpoint_written": (("step",), lambda f: f"checkpoint written{_at(f)}"),
    "checkpoint_committed": (("step",), lambda f: f"checkpoint committed by all parties{_at(f)}"),
    "checkpoint_refused": (("step",), lambda f: f"checkpoint refused{_at(f)}"),
    "held": (("step",), lambda f: f"paused between steps{_at(f)}"),
    "released": ((), lambda f: "continues after the hold"),
    "halted": (("step",), lambda f: f"halted with a checkpoint{_at(f)}"),
    "order_obeyed": (("mode",), lambda f: f"follows a signed {scalar_text(f.get('mode')) or 'halt'} order (relay)"),
    "lease_expired": ((), lambda f: "console lease expired: the pod halts by itself"),
    "worker_died": ((), lambda f: "worker process died"),
    "run_failed": (("error", "what"), _error),
    "proof_failed": (("step", "named", "pair", "open_to", "what"), _proof_failed),
    "protocol_error": (("party", "what"), lambda f: f"{_peer(f)} broke the protocol: {scalar_text(f.get('what'))}"),
    "evidence_replayed": ((), lambda f: "its transcript was replayed before it goes on"),
    # the console's own
    "quote": (("hourly", "at_most", "pods"), _quoted),  # what each constraint removed stands beside it
    "privacy_relay_started": (
        ("phase", "replica", "kind", "relay_host", "address_kind", "tls", "relay_url_local", "relay_url_public"),
        _relay_started,
    ),
    "run_facts": ((), lambda f: "its worker says what it runs"),
    "dp_master_port_selected": (("port",), lambda f: f"the ranks meet at port {scalar_text(f.get('port'))}".rstrip()),
    "succession": ((), lambda f: "goes on under another policy"),
    "pod_restored": ((), lambda f: "a checkpoint from home was brought to the pod"),
    "reserved_event": (
        ("event", "fields"),
        lambda f: f"the pod used a name that only the console may use: {scalar_text(f.get('event'))}",
    ),
    "dp_preflight_ok": ((), lambda f: "preflight passed"),
    "dp_preflight_failed": ((), lambda f: "preflight failed"),
    "checkpoint_verified": (("step",), lambda f: f"checkpoint verified{_at(f)}"),
    "exit": (("status", "step"), lambda f: f"worker ends, {scalar_text(f.get('status')) or 'without a word'}{_at(f)}"),
    "rewind": (("src", "reason"), lambda f: f"{scalar_text(f.get('src'))} begins anew: {scalar_text(f.get('reason'))}"),
}
PODS: Final = {
    "planned": "pod planned",
    "creating": "pod is being created",
    "booting": "pod boots",
    "ready": "pod reached over SSH",
    "agent": "its agent answers",
    "lost": "pod lost",
    "deleting": "pod is being deleted",
    "gone": "pod gone",
    "failed": "pod failed",
}
ACKS: Final = {
    "sent": "halt order sent",
    "seen": "halt order received",
    "held": "paused",
    "released": "continues",
    "halted": "halted, proof awaited",
    "gone": "processes ended",
    "unknown": "UNKNOWN, nothing proved",
}


def engine_words(event: str, fields: Fields) -> tuple[str, str]:
    """(sentence, what differs from pod to pod) of an engine event.

    One without a sentence of its own says what its name means; a name that is not known stays with its fields.
    """
    found = _SENTENCES.get(event)
    if found is None:
        known = NAMES.get(event)
        plain = {k: v for k, v in fields.items() if k not in _OWN}
        said = known.means.removeprefix("a ").removeprefix("the ") if known is not None else event
        used, text = tuple(plain), " ".join([said, *(f"{k}={_short(v)}" for k, v in plain.items())])
    else:
        used, text = found[0], found[1](fields)
    own = ((k, v) for k, v in fields.items() if k not in used and v not in (None, "", [], {}))
    return text, " ".join(f"{k}={_short(v)}" for k, v in own)


def ack_words(stage: str, step: int, checkpoint: str = "") -> str:
    """What a pod proved of a halt. Only who names a ``checkpoint`` behind its end has had one checked."""
    what, comma, more = ACKS.get(stage, stage).partition(", ")
    at = f" at step {step}" if step >= 0 else ""
    return what + at + comma + more + (", checkpoint verified" if stage == "gone" and checkpoint else "")


def value_words(value: Any) -> str:
    """Any value of a record or a profile as a file spells it (true, null, [1, 2], {k: v}), not as a program does."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {value_words(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(value_words(v) for v in value) + "]"
    return str(value)


def figure(value: float) -> str:
    """A measured number in three digits, or whole: 0.00012, 1.05, 4734, and 1e+20 where nobody counts digits."""
    return f"{value:.0f}" if 100 <= abs(value) < 1e15 else f"{value:.3g}"


def _short(value: Any) -> str:
    """A value of a field; of a hash the beginning."""
    text = value_words(value)
    long_hash = len(text) >= 32 and all(c in "0123456789abcdef" for c in text)
    return text[:_DIGEST] if long_hash else text
