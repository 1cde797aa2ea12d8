"""``uvcc domain init|show``: a domain's own key; ``export|join|open|consent``: the console of one party's domain.

``uvcc --party P`` is ``uvcc domain open --party P``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Final

from uvcc_console.cli import common
from uvcc_console.cli.main import OK
from uvcc_console.core.paths import DOMAIN
from uvcc_console.core.snapshot import Snapshot
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UnreadableError
from uvcc_engine.contract.parsing.untrusted import json_of, load_json

CONSENTS = ("full", "resume", "terminate")
SIGNED_S = 60.0
POLL_S = 0.05
_EXPORTED: Final = "uvcc domain export RUN --party P writes one"
_LARGEST: Final = 1 << 24  # bytes of a domain's file: a fleet of thousands of pods has a few million


def run(argv: list[str]) -> int:
    parser = common.Parser("domain", "A domain's own key, and the console of one party's domain with its credentials.")
    actions = parser.add_subparsers(dest="action", required=True, parser_class=common.VerbParser)
    init = actions.add_parser("init", help="make this installation's long-lived domain key and its site policy")
    init.add_argument(
        "--passphrase", action="store_true", help="have ssh-keygen ask for one; it asks again whenever the key signs"
    )
    init.add_argument("--key", type=Path, metavar="FILE", help="take up an Ed25519 key that ssh-keygen signs with")
    show = actions.add_parser("show", help="the public key, and its fingerprint to compare by voice")
    show.add_argument("file", type=Path, nargs="?", help="another domain's .pub file; this installation's without one")
    show.add_argument("--json", action="store_true", help="print JSON on standard output")
    export = actions.add_parser("export", help="write what a domain's console needs; it holds secrets")
    export.add_argument("run")
    export.add_argument("--party", type=int, required=True)
    export.add_argument("file", type=Path)
    join = actions.add_parser("join", help="open that console here; uvcc attach shows it again")
    join.add_argument("file", type=Path)
    join.add_argument("--headless", action="store_true", help="only start it")
    again = actions.add_parser("open", help="open a console that was joined here again: uvcc --party P is the same")
    again.add_argument("run", nargs="?", default="", help="the newest without one")
    again.add_argument("--party", type=int, required=True)
    again.add_argument("--headless", action="store_true", help="only start it")
    consent = actions.add_parser("consent", help="sign for what needs the word of several domains")
    consent.add_argument("run")
    consent.add_argument("what", choices=CONSENTS)
    consent.add_argument(
        "--number", type=int, default=0, metavar="N", help="which resume of the run; the next by what is known here"
    )
    args = parser.parse_args(argv)
    verbs = {"init": _init, "show": _show_key, "export": _export, "join": _join, "open": _open, "consent": _consent}
    return verbs[args.action](args)


def _init(args: argparse.Namespace) -> int:
    from uvcc_console.federation import domain_key, site_policy
    from uvcc_engine.contract.run_files.files import write_atomic

    made = domain_key.create(args.key, passphrase=args.passphrase)
    if not (policy := made.folder / site_policy.FILE).exists():
        write_atomic(policy, site_policy.DEFAULT_TEXT.encode(), mode=0o600)
    common.say(f"this domain's key and what it lets be done: {made.folder}")
    tell_key(made.public)
    return OK


def _show_key(args: argparse.Namespace) -> int:
    from uvcc_console.federation import domain_key

    public = domain_key.read_public(args.file) if args.file is not None else domain_key.load().public
    tell_key(public, as_json=args.json)
    return OK


def tell_key(public: str, *, as_json: bool = False) -> None:
    """A person's key, and the digits by which the others know it: those of every screen of a proposal."""
    from uvcc_console.federation.domain_key import fingerprint

    if as_json:
        common.emit({"key": public, "fingerprint": fingerprint(public)})
    else:
        common.show(f"{public}\nfingerprint {fingerprint(public)}")


def _export(args: argparse.Namespace) -> int:
    from uvcc_console.runs import domain

    run_dir = common.find_run(args.run)
    found = domain.export(run_dir, common.load_snapshot(run_dir), args.party)
    fd = os.open(args.file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as f:
        json.dump(found, f)
    common.say(f"{args.file}: the console of P{args.party}; it holds that party's credentials")
    return OK


def _join(args: argparse.Namespace) -> int:
    from uvcc_console.runs import domain

    path: Path = args.file
    try:
        with path.open("rb") as file:  # which may be a pipe: it holds credentials
            document = load_json(file.read(_LARGEST + 1), _LARGEST)
    except OSError as e:
        raise UnreadableError(f"cannot read {path}: {e.strerror}", _EXPORTED) from e
    except ValueError as e:
        raise UnreadableError(f"{path} is no domain's file: {e}", _EXPORTED) from e
    if not isinstance(document, dict):
        raise UnreadableError(f"{path} is no domain's file", _EXPORTED)
    return _show(domain.join(document), args.headless)


def _open(args: argparse.Namespace) -> int:
    from uvcc_console.core import paths

    found: list[tuple[float, Path]] = []
    for record in (folder / DOMAIN for folder in paths.run_folders()):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if json_of(record.read_text()).get("party") == args.party and record.parent.name.startswith(args.run):
                found.append((record.stat().st_mtime, record.parent))
    if not found:
        what = f"no console of P{args.party}'s domain was joined here" + (f" for {args.run}" if args.run else "")
        raise ConfigError(what, "uvcc domain join FILE, with the file that the operator exported for that party")
    return _show(max(found)[1], args.headless)


def _show(run_dir: Path, headless: bool) -> int:
    from uvcc_console.runs import processes

    if not processes.running(run_dir, processes.HALTD):
        processes.start(run_dir, processes.HALTD)
    common.say(f"joined as {run_dir.name}; F9 there halts all domains")
    if headless or not sys.stdout.isatty():
        return OK
    from uvcc_console.cli.screen.launch import show

    return show(run_dir, readonly=True)


def _consent(args: argparse.Namespace) -> int:
    from uvcc_console.federation import seat
    from uvcc_console.halt import relay_path
    from uvcc_engine.transcript.signed.consents import label

    run_dir = common.find_run(args.run)
    s = common.load_snapshot(run_dir)
    what = label(args.what, args.number or s.resumes + 1)
    if (run_dir / seat.FILE).exists():
        return _sign_in_own_run(run_dir, args.what)
    if not (run_dir / DOMAIN).exists():
        raise ConfigError(f"{run_dir.name} is not a domain's console", "uvcc domain join FILE opens one")
    _check_goes_on(run_dir, s)
    boxes = relay_path.mailboxes(run_dir, s.engine_run)
    if not boxes:
        raise ConfigError(f"{run_dir.name} has no relay that the signature could be left at", "its phase has not begun")
    for box in boxes:
        box.exchange(relay_path.consent(run_dir, s.engine_run, what), relay_path.CONSENT)
    common.say(f"signed: {what} of {s.engine_run}")
    return OK


def _check_goes_on(run_dir: Path, s: Snapshot) -> None:
    """Raises ConfigError for a run that has ended: nobody counts what is signed for it now."""
    if s.ended:
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(s.ended))
        why = f": {s.detail}" if s.detail else ""
        hint = "nothing of it is signed for any more; uvcc rollout ... --proposal begins the next attempt"
        raise ConfigError(f"{run_dir.name} has ended at {when}, {s.status}{why}", hint)


def _sign_in_own_run(run_dir: Path, what: str) -> int:
    """Have this domain's own conductor sign, and leave it for the others. Raises UvccError with its refusal."""
    from uvcc_console.cli.follow import headless
    from uvcc_console.core import events as ev
    from uvcc_console.core.journal.journal import Journal
    from uvcc_console.runs import processes

    s = common.load_summary(run_dir)
    _check_goes_on(run_dir, s)
    if not processes.running(run_dir, processes.CONDUCTOR):
        hint = "only its conductor signs; uvcc teardown ends it here, and the three domains begin the next attempt"
        raise ConfigError(f"nobody conducts {run_dir.name}", hint)
    seq = s.seq
    headless.ask(run_dir, "consent", what=what)
    journal = Journal(run_dir / processes.JOURNAL, readonly=True)
    end = time.monotonic() + SIGNED_S
    try:
        while time.monotonic() < end:
            for _, event in journal.since(seq, kinds=(ev.Consent.kind, ev.ActionDone.kind)):
                if isinstance(event, ev.ActionDone) and event.action == "consent":
                    raise ConfigError(event.detail)
                if isinstance(event, ev.Consent) and event.what.partition("-")[0] == what and event.own:
                    common.say(f"signed: {event.what}")
                    return OK
            time.sleep(POLL_S)
    finally:
        journal.close()
    raise UnreachableError(f"the relay did not show the signature within {SIGNED_S:.0f} s", "uvcc logs tells more")
