"""``python -m docs.make [--check]``: write every generated page anew, or name those that are not as the code has it.

Run it in the folder that holds ``docs``. A page keeps what stands around its marks; between them it is made here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from docs.make import (
    agent,
    alerts,
    bundle_vectors,
    commands,
    costs,
    decisions,
    environment,
    events,
    figures,
    growth,
    layers,
    lm_config,
    man,
    profiles,
    protocols,
    relay,
    session_vectors,
    statement_vectors,
    tables,
    vectors,
)

DOCS: Final = Path(__file__).parents[1]
PAGES: Final[dict[str, Callable[[], str]]] = {
    "benchmarks.md": figures.page,
    "decisions.md": decisions.page,
    "growth.md": growth.page,
    "reference/cli.md": commands.console,
    "reference/engine-cli.md": commands.engine,
    "reference/uvcc.1": man.console,
    "reference/uvcc-engine.1": man.engine,
    "reference/profile.md": profiles.page,
    "reference/layers.md": layers.page,
    "reference/lm-config.md": lm_config.page,
    "reference/profile.schema.json": profiles.schema,
    "reference/environment.md": environment.page,
    "reference/exit-codes.md": tables.exit_codes,
    "reference/events.md": events.page,
    "reference/metrics.md": tables.metrics,
    "reference/keys.md": tables.keys,
    "security/protocols.md": protocols.page,
    "security/costs.md": costs.page,
    "runbooks/index.md": alerts.index,
    "specifications/agent-protocol.md": agent.page,
    "specifications/vectors/run-contract.json": vectors.run_contract,
    "specifications/vectors/agent-protocol.json": vectors.agent_protocol,
    "specifications/vectors/relay-exchange.json": vectors.relay_exchange,
    "specifications/vectors/frame.json": vectors.frames,
    "specifications/vectors/evidence.json": vectors.evidence,
    "specifications/vectors/bundle.json": bundle_vectors.bundle,
    "specifications/vectors/statements.json": statement_vectors.statements,
    "specifications/vectors/session.json": session_vectors.session,
    "specifications/evidence.md": tables.evidence,
    "specifications/relay-openapi.json": relay.openapi,
}
"""Page below ``docs`` -> what it should hold."""


def stale() -> dict[str, str]:
    """Every page that is not what the code makes, with what it should be."""
    made = {name: make() for name, make in PAGES.items()}
    return {name: text for name, text in made.items() if not (DOCS / name).is_file() or _read(name) != text}


def _read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """Write, or with ``--check`` only look. Returns the exit code."""
    found = stale()
    for name, text in found.items():
        if "--check" not in argv:
            (DOCS / name).write_text(text, encoding="utf-8")
        print(f"{'stale' if '--check' in argv else 'written'}: docs/{name}")
    return 1 if found and "--check" in argv else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
