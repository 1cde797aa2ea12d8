"""The page about what a console and a pod's agent say to each other, from the records that both read with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from docs.make.words import HEAD, cell, prose


def _fields(kind: type) -> Iterator[str]:
    found = dataclasses.fields(kind)  # type: ignore[arg-type]
    if not found:
        yield from ("No fields.", "")
        return
    yield from ("| field | type |", "|---|---|")
    for f in found:
        yield f"| `{f.name}` | {cell(str(f.type))} |"
    yield ""


def page() -> str:
    """The specification."""
    from uvcc_engine.contract.agent_protocol import agent_commands, agent_messages, wire
    from uvcc_engine.contract.job.spec import WorkerSpec

    lines = [
        "# The agent protocol",
        "",
        HEAD,
        "",
        f"Version {wire.VERSION}. A console talks with a pod's agent over one channel, mostly an SSH session that runs",
        "`uvcc_engine.agent.attach`: JSON lines both ways, UTF-8, one object a line. Each has an `op`. Fields that a",
        "reader does not know are passed over, so that an older console can watch a newer agent; an unknown command is",
        "refused. There is no canonical form: no line is signed or hashed, and the order of its fields says nothing.",
        "Words are those of the [glossary](../glossary.md).",
        "",
        f"Limits: a console takes no line longer than {agent_messages.LONGEST >> 20} MiB and no more than",
        f"{agent_messages.MOST_LINES:,} lines in one message. A run id is `[A-Za-z0-9][A-Za-z0-9._-]{{0,127}}`.",
        "",
        "Every command carries a `nonce` and is answered by exactly one `ack` with the same nonce; a command may be",
        "sent again. Everything else the agent sends by itself. Files are the queue: a console that was away asks for",
        "what it has not had by its cursors, an inode and an offset for each file. Consoles decide by codes, never by",
        "texts.",
        "",
        "## Commands",
        "",
    ]
    for op, kind in agent_commands.OPS.items():
        lines += [f"### {op}", "", cell(prose(kind.__doc__)), "", *_fields(kind)]
    lines += [
        "### A worker of a launch",
        "",
        cell(prose(WorkerSpec.__doc__)),
        "",
        *_fields(WorkerSpec),
        "## Answers",
        "",
    ]
    lines += ["### ack", "", cell(prose(agent_messages.Ack.__doc__)), "", *_fields(agent_messages.Ack)]
    lines += ["`code` of a refusal:", "", "| code |", "|---|", *(f"| `{c.value}` |" for c in wire.AckCode), ""]
    lines += ["## What an agent says by itself", ""]
    for kind, op in agent_messages._OPS.items():
        lines += [f"### {op} (told)", "", cell(prose(kind.__doc__)), "", *_fields(kind)]
    lines += ["`lacks` of a worker that is gone without a verified checkpoint:", "", "| lacks |", "|---|"]
    lines += [f"| `{c.value}` |" if c.value else "| empty: it shows one |" for c in wire.Lacks]
    lines += [
        "",
        "## Test vectors",
        "",
        "`vectors/agent-protocol.json` holds lines of an agent, and what a reader makes of each.",
        "",
    ]
    return "\n".join(lines).rstrip() + "\n"
