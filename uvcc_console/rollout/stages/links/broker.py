"""``link: nats``: the workers meet at a JetStream server that somebody else runs; the pods are told how to reach it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from uvcc_console.plan.plan import Phase
from uvcc_console.rollout.context import Member, Rollout, each
from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.parsing.small_text import read_small_bytes

TOKEN_FILE = "nats.token"
CA_FILE = "nats.ca.pem"


async def nats_links(ctx: Rollout, phase: Phase) -> dict[str, LinkSpec]:
    """The ``link`` of every worker, by coordinate; every replica is a group of its own.

    The token and the trusted certificate are read here and put beside the run on each pod, readable by its user only.
    Raises UnreadableError if one cannot be read, UnreachableError if a pod is lost.
    """
    part, there = ctx.plan.profile.nats, f"runs/{phase.engine_run}"
    wanted = {TOKEN_FILE: part.token_file, CA_FILE: part.ca_file}
    found = {name: _read(path) for name, path in wanted.items() if path}

    async def give(member: Member) -> None:
        await member.ssh.sh(f"umask 077; mkdir -p .uvcc/{there}")
        for name, data in found.items():
            await member.ssh.put(data, f".uvcc/{there}/{name}")

    await each(ctx.of_phase(phase), give)
    link = LinkSpec(
        kind="nats",
        nats_url=part.url,
        token_file=f"{there}/{TOKEN_FILE}" if TOKEN_FILE in found else "",
        ca_file=f"{there}/{CA_FILE}" if CA_FILE in found else "",
    )
    return {str(c): replace(link, group=f"{phase.engine_run}-r{c.replica}") for c in phase.coords()}


def _read(path: str) -> bytes:
    try:
        return read_small_bytes(Path(path).expanduser())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UnreadableError(f"cannot read {path}: {why}", "correct nats.token_file or nats.ca_file") from error
