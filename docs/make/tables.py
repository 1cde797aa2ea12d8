"""Exit codes, metrics and keys as pages."""

from __future__ import annotations

from typing import Final

from docs.make.alerts import CODES, anchor
from docs.make.words import HEAD, cell

SERIES: Final[dict[str, str]] = {
    "mem_mib": "resident memory of the worker, MiB",
    "gpu_mem_alloc_mib": "GPU memory that the worker holds, MiB",
    "gate_entropy_mean": "mean entropy of the attention gates",
    "gate_collapse_frac": "share of attention gates that chose one branch for good",
    "dt_fetch_s": "seconds that fetching a step's data took",
    "bytes": "bytes sent to other parties in a step",
    "step_s": "seconds a step, by the pod's own clock, between two heartbeats of training without a hold",
    "loss": "the loss that the worker reports",
    "lr": "the learning rate",
    "toks_per_s": "tokens a second",
    "samples_per_s": "rows a second of a private job",
    "ppl": "perplexity on the validation data",
}
RELAY: Final[dict[str, str]] = {
    "enqueued_total": "messages stored",
    "deduplicated_total": "messages that were here already",
    "refused_total": "messages refused: quota, collision, or not allowed",
    "delivered_total": "messages handed out",
    "acknowledged_total": "messages whose receiver is done with them",
    "expired_total": "messages that nobody took in time",
    "redelivered_total": "messages handed out again after a lease ended",
    "bytes_in_total": "bytes of payloads stored",
    "bytes_out_total": "bytes of payloads handed out",
    "ready": "messages that wait to be taken",
    "leased": "messages handed out and not yet acknowledged",
    "waiting": "receivers that wait for a message",
    "bytes_in_memory": "bytes held in memory",
    "refused_connections_total": "connections turned away",
    "connections": "connections that have shown a token",
    "strangers": "connections that have shown none",
    "arriving_bytes": "bytes of requests that are not whole yet",
    "commits_total": "commits of the store",
    "rows_total": "rows that were written",
    "queued_messages": "by group and party: messages queued",
    "queued_bytes": "by group and party: bytes queued",
}


def exit_codes() -> str:
    """The list, each with the way to its runbook."""
    lines = [
        "# Exit codes",
        "",
        HEAD,
        "",
        "`uvcc` exits with 0, 1, 2 or 130, and `verify` and `pods` with more. `uvcc-engine` and the workers on pods",
        "exit with the code of the error that ended them.",
        "",
        "| code | means |",
        "|---|---|",
    ]
    lines += [
        f"| [`{code}`](../runbooks/exit-codes.md#{anchor(code)}) | {cell(means)} |" for code, means in CODES.items()
    ]
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """What is measured, where it comes from."""
    lines = [
        "# Metrics",
        "",
        HEAD,
        "",
        "## Of a run",
        "",
        "Series by worker and step, in panel 2 and in `uvcc status RUN --json`. They come from `training.csv`,",
        "`val.csv` and the heartbeats of a [run directory](../specifications/run-contract.md); what a pod",
        "reports counts as reported, not as verified.",
        "",
        "| series | means |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {about} |" for name, about in SERIES.items()]
    lines += [
        "",
        "## Of a relay",
        "",
        "`GET /metrics` of the [relay](../specifications/relay-api.md), in Prometheus' text format, for parties.",
        "Every name begins with `uvcc_relay_`.",
        "",
        "| metric | means |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {about} |" for name, about in RELAY.items()]
    return "\n".join(lines) + "\n"


def keys() -> str:
    """Every key of the console."""
    from uvcc_console.ui.registry.keys import markdown_table

    lines = [
        "# Keys of the console",
        "",
        HEAD,
        "",
        "Every action has a key, a word on the `:` line, or both; most have a command without a screen. `?` in the",
        "console shows the same list, with the reason where something is not possible now.",
        "",
        markdown_table(),
    ]
    return "\n".join(lines) + "\n"


def evidence() -> str:
    """The format that lies in every package beside its verifier."""
    from importlib import resources

    text = (resources.files("uvcc_engine") / "transcript" / "proof" / "EVIDENCE.md").read_text(encoding="utf-8")
    title, _, rest = text.partition("\n")
    from uvcc_engine.transcript.formats import reading

    note = [
        "This is the very text that lies as `EVIDENCE.md` in each package; `verify.py` beside it cites its sections.",
        "Words are those of the [glossary](../glossary.md). `vectors/bundle.json` holds a whole small run with its",
        "keys and roots, `vectors/evidence.json` identifiers, trees, leaves and canonical JSON of small inputs.",
        "",
        f"Limits of our own readers: JSON nested {reading.DEPTH} deep, {reading.SMALL >> 20} MiB for a result or",
        f"a list of signatures, {reading.LARGEST >> 30} GiB for any file that is read as a whole.",
    ]
    return "\n".join([title, "", HEAD, "", *note, rest]).rstrip() + "\n"
