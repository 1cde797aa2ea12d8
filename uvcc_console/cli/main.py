"""``uvcc``: one verb a module, imported only when it is used, so that help is instant.

Exit codes: 0 done and, where there is something to verify, verified; 1 it failed or does not hold; 2 wrong usage or
unreadable input; 130 interrupted. `verify` has further ones for what was not checked, and `pods` has 3 for
what nobody can tell yet: see `uvcc verify --help` and `uvcc pods --help`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Final, NamedTuple

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130
FLAGS: Final = ("--help", "--version", "--party", "--read-only")


class Verb(NamedTuple):
    """A verb lives in ``cli/<room>/<verb>.py``; ``does`` is its line in the help."""

    room: str
    does: str


VERBS: Final[dict[str, Verb]] = {
    "demo": Verb("start", "the whole story on three local pods, ending verified; nothing is left behind"),
    "rollout": Verb("start", "run a profile: plan, quote, provision, smoke, verify, full, verify, collect, tear down"),
    "plan": Verb("start", "what a rollout would do, reveal and cost, and what a step of it takes; nothing is rented"),
    "adopt": Verb("start", "follow a run that somebody else started, by its folder, here or over SSH"),
    "runs": Verb("view", "list the runs of this machine"),
    "costs": Verb("view", "what every run's pods cost, by our clock and by the provider's bill; --csv"),
    "status": Verb("view", "what a run is doing now"),
    "logs": Verb("view", "what the run's processes logged: its conductor and its halt sidecar"),
    "top": Verb("view", "a run's workers as a table that renews itself"),
    "watch": Verb(
        "view", "events as JSON lines: of a run, or of any folder that a trainer writes to, here or over SSH"
    ),
    "attach": Verb("screen", "the console on a live run"),
    "serve": Verb("screen", "the read-only console in a browser, at a guarded address of this machine"),
    "replay": Verb("screen", "the console on a recorded run"),
    "halt": Verb("steer", "stop a run with proof; --drill only rehearses it"),
    "resume": Verb("start", "go on from the last common checkpoint"),
    "pod": Verb("steer", "stack dump, fetch, restart, replace, triage: what the console's keys do"),
    "infer": Verb("parties", "a client of a model that is served: make a key, get a ticket, ask"),
    "data": Verb("parties", "infer FILE: a first schema of your own CSV file"),
    "owner": Verb("parties", "the data owner's: make a key, open a run's results, predict with them in clear"),
    "domain": Verb("parties", "init, show: a domain's own key; export, join, open, consent: a party's console"),
    "propose": Verb("parties", "ask three domains for their approval of one run, by a signed text at a relay"),
    "proposals": Verb("parties", "what lies at a relay for approval, and what each domain said of it"),
    "join": Verb("parties", "read a proposal whole; approve or refuse it with this domain's key"),
    "teardown": Verb("steer", "delete a run's pods and prove it"),
    "verify": Verb("evidence", "check a run, its artifacts or a proof bundle"),
    "package": Verb("evidence", "everything for an auditor in one archive, with a verifier of its own"),
    "compare": Verb("evidence", "two runs or packages side by side: the same job, data, run? where do they part?"),
    "timestamp": Verb("evidence", "when a run's policies and bundles existed, by a service that one trusts"),
    "bundle": Verb("evidence", "one explained log file of a run"),
    "figures": Verb("evidence", "plots of a run"),
    "handoff": Verb("evidence", "the hand-over checklist of a run, filled from facts"),
    "pods": Verb("steer", "pods that exist; --sweep deletes what dead runs left"),
    "docs": Verb("machine", "the manual: a page, an alert, a gate, a verb; with a search"),
    "man": Verb("machine", "the man page of uvcc, or of uvcc-engine"),
    "doctor": Verb("machine", "is this machine and terminal fit for it?"),
    "paths": Verb("machine", "where files lie"),
    "profiles": Verb("machine", "known profiles; show NAME prints one"),
    "config": Verb("machine", "the settings of this machine's operator, and where each came from"),
    "completion": Verb("machine", "verbs, options, values and run names at the Tab key of your shell"),
    "tensorboard": Verb("view", "a run's TensorBoard through its pod's SSH connection"),
    "bench": Verb("machine", "the console's own benchmarks"),
}
_USAGE = """\
usage: uvcc [VERB] [options]
       uvcc [--read-only]      the console over all runs
       uvcc --party P          that of one domain"""


def module_of(verb: str) -> ModuleType:
    """The module of a verb, or of ``console``, imported now."""
    room = VERBS[verb].room if verb in VERBS else "screen"
    return importlib.import_module(f"uvcc_console.cli.{room}.{verb}")


def groups() -> dict[str, list[str]]:
    """The verbs by who uses them."""
    rooms = {"evidence": "evidence, for operators and auditors", "machine": "this machine"}
    owners = {"data": "data owner", "owner": "data owner", "infer": "client of a served model"}
    found: dict[str, list[str]] = {
        title: [] for title in ("operator", *rooms.values(), "data owner", "client of a served model", "domain")
    }
    for verb, about in VERBS.items():
        usual = "domain" if about.room == "parties" else "operator"
        found[owners.get(verb) or rooms.get(about.room, usual)].append(verb)
    return {title: verbs for title, verbs in found.items() if verbs}


def usage() -> str:
    """The text of ``uvcc --help``."""
    from uvcc_engine.contract.machine import help_text

    width = max(len(v) for v in VERBS)
    lines = [_USAGE, ""]
    for title, found in groups().items():
        lines += [title, *(f"  {verb:<{width}}  {VERBS[verb].does}" for verb in found), ""]
    lines.pop()
    lines += ["", "RUN may be shortened to a unique prefix, or be `last` or `current`. `uvcc VERB --help` says more."]
    return help_text.filled("\n".join(lines), help_text.width()) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command. Returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        from uvcc_console.core.log import tell_of_warnings
        from uvcc_engine.contract.errors import UvccError
        from uvcc_engine.contract.machine import standard_output

        tell_of_warnings()
        try:
            return standard_output.guarded(lambda: _guarded(args))
        except UvccError as e:  # of standard output: that of a verb is told already
            from uvcc_console.cli.common import tell_error

            return tell_error(e, FAILED, [])
    except KeyboardInterrupt:
        return INTERRUPTED


def _guarded(args: list[str]) -> int:
    from uvcc_engine.contract.errors import UnreadableError, UvccError

    try:
        try:
            return _dispatch(args)
        except PermissionError as e:  # of any of the many files of a run: it says all that there is to know
            if e.filename is None:
                raise
            what = f"cannot use {os.fsdecode(e.filename)}: {e.strerror}"
            raise UnreadableError(what, "look whose it is, and who may read and write it") from e
    except UvccError as e:
        from uvcc_console.cli.common import tell_error

        return tell_error(e, USAGE if e.exit_code == USAGE else FAILED, args)


def _dispatch(args: list[str]) -> int:
    if args and args[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return OK
    if args and args[0] in ("-V", "--version"):
        from uvcc_console.cli.common import version

        sys.stdout.write(f"uvcc {version()}\n")
        return OK
    if args and args[0].partition("=")[0] == "--party":  # one domain's console
        args = ["domain", "open", *args]
    if args and args[0] == "--read-only":  # the console without a verb, as every other flag of that name
        args = ["console", *args]
    verb = args[0] if args else "console"
    if verb != "console" and verb not in VERBS:
        from uvcc_engine.contract.errors import ConfigError
        from uvcc_engine.contract.parsing.suggest import CLOSE, nearest

        kind, known = ("option", FLAGS) if verb.startswith("-") else ("verb", tuple(VERBS))
        close = nearest(verb.partition("=")[0], known, CLOSE)
        raise ConfigError(f"unknown {kind} {verb!r}", f"did you mean {close}?" if close else "see: uvcc --help")
    return int(module_of(verb).run(args[1:]))


if __name__ == "__main__":
    sys.exit(main())
