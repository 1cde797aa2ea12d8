"""``verify PATH``: check a run, its artifacts or one proof bundle, from files alone.

PATH is a run's folder, its artifacts, the folder of one phase, or a proof_bundle.json. Of a whole run every phase and
every file in the manifest is checked; the full phase decides. Where the proof of a step failed, whom the parties signed
that they suspect (finding_COORD.json, which may be PATH, too) is told with what follows from it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError, VerificationError
from uvcc_engine.contract.machine.by_itself import exit_code
from uvcc_engine.contract.machine.help_text import HelpFormatter
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.contract.machine.reading_width import for_reader
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.proof import approval_check, package, public_log
from uvcc_engine.transcript.signed import proof_findings
from uvcc_engine.transcript.signing.signers import read_allowed_signers
from uvcc_engine.transcript.terms.operation import BY_THREE
from uvcc_engine.transcript.terms.policy import Policy

EXITS = """exit codes:
  0  VERIFIED: everything that the contract promises was checked and holds
  1  NOT VERIFIED: something does not hold (named), or lacks though --require names it
  2  UNREADABLE, or wrong usage
  HOLDS AS FAR AS CHECKED, but (of several, the smallest code; all are listed):
  3  pinned: nobody said whose keys are expected (--allowed-signers, --policy, or a run of one's own)
  4  transcripts: no leaf was recomputed, or a folder could not be listed
  5  full: the run's full phase is missing
  6  manifest: the files beside the bundle are not covered by a manifest of a known collector
"""


def parser(prog: str = "uvcc-engine verify", kind: type[RaisingParser] = RaisingParser) -> argparse.ArgumentParser:
    """The arguments of the verb; ``kind`` tells wrong usage in its own way."""
    made = kind(
        prog=prog,
        description=__doc__,
        epilog=EXITS,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("path", type=Path, help="a run, its artifacts, a phase's folder, or a proof_bundle.json")
    made.add_argument(
        "--allowed-signers",
        type=Path,
        metavar="F",
        help="OpenSSH allowed_signers file naming P0, P1, P2 and, for the manifest, collector",
    )
    made.add_argument(
        "--domain",
        action="append",
        default=[],
        type=Path,
        metavar="F.pub",
        help="key of a domain that must have approved the run beforehand; once for each of the three",
    )
    made.add_argument("--policy", type=Path, metavar="F", help="the policy.json one expects")
    made.add_argument("--transcripts", type=Path, metavar="DIR", help="transcripts (default: beside the bundle)")
    made.add_argument(
        "--against", type=Path, metavar="BUNDLE", help="a rerun that must have the same roots and results"
    )
    made.add_argument("--phase", default="", metavar="NAME", help="only this phase of a run, for instance smoke")
    made.add_argument(
        "--require",
        default="",
        metavar="WHAT",
        help=f"not verified unless these were checked: {','.join(package.CODES)}",
    )
    made.add_argument(
        "--head", type=_head, metavar="SIZE:HASH", help="a head noted while the run went on, which it must extend"
    )
    made.add_argument(
        "--log-key",
        type=Path,
        metavar="PEM",
        help="public key of the transparency log in which every phase's policy and root must have been entered",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def _head(text: str) -> tuple[int, str]:
    size, _, wanted = text.partition(":")
    if not size.isascii() or not size.isdigit() or len(size) > 10 or not re.fullmatch("[0-9a-f]{64}", wanted):
        raise argparse.ArgumentTypeError("write SIZE:HASH, the number of epochs and 64 lower-case hex digits")
    return int(size), wanted


NOT_ASKED: Final = (
    "whether three domains approved this and drove it: so says its policy only; name their keys with --domain F.pub"
)
PinsFound = Callable[[Path], package.ExpectedSigners | None]


def main(
    argv: Sequence[str],
    *,
    pins: PinsFound = lambda path: None,
    resolve: Callable[[str], Path] = Path,
    prog: str = "uvcc-engine verify",
) -> int:
    """Run the verb; returns its exit code.

    ``pins`` finds whom one expects where no option says so; ``resolve`` makes a path of a run's name.
    """
    args = parser(prog).parse_args(argv)
    said = package.UNPINNED
    failed: list[proof_findings.Conclusion] = []
    try:
        path = resolve(str(args.path))
        failed = _failed_proofs(path, args.policy)
        if path.is_file() and proof_findings.is_name(path.name):
            raise _of_a_finding(path, failed, pinned=args.policy is not None)
        target = package.find(path, args.phase)
        expected = _pins(args, pins, target)
        said = expected.said
        if not args.json:
            _show(said)
        found = package.examine(
            target,
            expected,
            policy=args.policy,
            transcripts=args.transcripts,
            against=args.against,
            require=frozenset(word for word in args.require.split(",") if word),
            head=args.head,
        )
        approved = approval_check.check(target, approval_check.read_keys(args.domain)) if args.domain else ""
        key = _log_key(args.log_key)
        logged = public_log.check(target, found.certificates, key) if key else []
    except UvccError as e:
        return _refused(e, said, failed, as_json=args.json)
    except (OSError, MemoryError, RecursionError) as e:
        return _refused(UnreadableError(f"cannot be read: {reading.reason(e)}"), said, failed, as_json=args.json)
    told = found.to_json() | ({"approved": approved} if approved else {}) | ({"logged": logged} if logged else {})
    told |= {"failed_proofs": proof_findings.report(failed)} if failed else {}
    by_three = any(BY_THREE in one.operation for one in found.certificates.values())
    told |= {"not_asked": NOT_ASKED} if by_three and not args.domain else {}
    not_asked = f"NOT ASKED    {NOT_ASKED}" if by_three and not args.domain else ""
    lines = (found.text(), approved, not_asked, *logged, *_told(failed))
    if args.json:
        print(json.dumps(told))
    else:
        _show("\n".join(filter(None, lines)))
    return found.exit_code


def _show(text: str) -> None:
    print(for_reader(text, sys.stdout))


def _failed_proofs(path: Path, policy: Path | None) -> list[proof_findings.Conclusion]:
    """What follows from the findings in a folder, or from the one file that ``path`` names."""
    expected = None if policy is None or path.is_dir() else Policy.load(policy)
    return proof_findings.told(path, expected) if path.is_dir() or proof_findings.is_name(path.name) else []


def _of_a_finding(path: Path, failed: Sequence[proof_findings.Conclusion], *, pinned: bool) -> UvccError:
    if not failed:
        return UnreadableError(
            f"{reading.shown(path)} holds nothing that a party of its policy signed", "fetch it again"
        )
    keys = "the expected policy" if pinned else "the policy in the file itself, which --policy pins"
    return VerificationError(
        "proof", f"the proof of a step failed; what is signed about it is signed by keys of {keys}"
    )


def _told(failed: Sequence[proof_findings.Conclusion]) -> list[str]:
    return [f"FAILED PROOF {reading.shown(line)}" for one in failed for line in one.lines()]


def _log_key(path: Path | None) -> public_log.LogKey | None:
    if path is None:
        return None
    return public_log.LogKey.from_pem(reading.read_file(path, named=True), str(path))


def _pins(args: argparse.Namespace, pins: PinsFound, target: package.PackageTarget) -> package.ExpectedSigners:
    """Only what the caller names, or what is the caller's own; never what lies beside the bundle."""
    if args.allowed_signers is not None:
        signers = read_allowed_signers(args.allowed_signers)
        said = f"identities pinned by {reading.shown(args.allowed_signers)}{_where(args.allowed_signers, target)}"
        return package.ExpectedSigners(said, lambda phase: signers)
    if args.policy is not None:
        Policy.load(args.policy)
        return package.ExpectedSigners(
            f"identities pinned by {reading.shown(args.policy)}{_where(args.policy, target)}"
        )
    if args.domain and (found := approval_check.vouched(target, approval_check.read_keys(args.domain))) is not None:
        return found
    return pins(args.path) or package.ExpectedSigners()


def _where(pins: Path, target: package.PackageTarget) -> str:
    """A file that came with the bundle pins no more than the bundle itself; the caller may not have noticed."""
    under = target.root or next(iter(target.phases.values())).parent
    inside = Path(os.path.realpath(pins)).is_relative_to(under)
    return ", WHICH LIES IN THE FOLDER UNDER TEST: whoever made it chose the keys" if inside else ""


def _refused(error: UvccError, said: str, failed: Sequence[proof_findings.Conclusion] = (), *, as_json: bool) -> int:
    known = isinstance(error, VerificationError)
    verdict = "NOT VERIFIED" if known else "UNREADABLE"
    check = error.check if isinstance(error, VerificationError) else "unreadable"
    what, hint = reading.shown(error.what, 4000), reading.shown(error.hint, 1000)
    if as_json:
        found: dict[str, Any] = {"ok": False, "verdict": verdict, "complete": False, "pins": said}
        found |= {"failed_proofs": proof_findings.report(failed)} if failed else {}
        print(json.dumps({**found, "check": check, "what": what, "hint": hint}))
    elif failed:
        _show("\n".join(_told(failed)))
    print(for_reader(f"{verdict}  {what}" + (f" ({hint})" if hint else ""), sys.stderr), file=sys.stderr)
    return 1 if known else ConfigError.exit_code


if __name__ == "__main__":
    sys.exit(exit_code(main))
