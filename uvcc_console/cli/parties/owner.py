"""``uvcc owner``: a data owner's key, the domains it trusts, what it gives to a run, what comes back, and its audit."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from uvcc_console.cli import common
from uvcc_console.cli.main import FAILED, OK
from uvcc_console.cli.parties.domain import tell_key
from uvcc_console.cli.parties.propose import add_relay, meeting
from uvcc_console.core.answers.shown import shown
from uvcc_console.federation import data_owner, owner_joining, owner_results
from uvcc_console.federation.domain_key import fingerprint
from uvcc_console.federation.proposing import screen
from uvcc_console.plan.owndata import fitted_file, give_fitted, owners_program
from uvcc_console.plan.plan import FULL
from uvcc_console.report.model_card import model_card
from uvcc_console.report.recheck import recheck
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.job.column_join import ColumnJoin
from uvcc_engine.contract.job.early_stop import Course
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.transcript.leaves.leaf_file import BUNDLE
from uvcc_engine.transcript.proof.bundle import POLICY_FILE, read_bundle
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy

_SHARED_BEFORE: Final = (
    "for attempt {} this owner has sealed its rows before, and shares these; other rows take the domains' next attempt"
)
MODEL, FITTED, CARD = owner_files.MODEL, owner_files.PREPROCESSING, owner_files.CARD


def run(argv: list[str]) -> int:
    parser = common.Parser("owner", "The data owner's side: a key, a finished run's results, and their use in clear.")
    actions = parser.add_subparsers(dest="action", required=True, parser_class=common.VerbParser)
    init = actions.add_parser("init", help="make a data owner's key; whoever has its folder opens the results")
    init.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="a new folder, for the owner's eyes only")
    pins = actions.add_parser("pin", help="trust these domains' keys, after their digits were compared by voice")
    pins.add_argument("keys", nargs="+", type=Path, metavar="FILE.pub")
    asked = actions.add_parser("requests", help="the proposals that ask for this owner's data, and who approved them")
    asked.add_argument("--json", action="store_true", help="print JSON on standard output")
    gives = actions.add_parser("share", help="split, seal and send rows for a proposal that three domains approved")
    gives.add_argument("proposal", metavar="PROPOSAL", help="its id, or the beginning of it; see: uvcc owner requests")
    gives.add_argument("--attempt", type=int, default=-1, metavar="N", help="the newest that has pods, without it")
    gives.add_argument(
        "--wait", type=float, default=0.0, metavar="S", help="so long for the domains to sign for their pods (0)"
    )
    gives.add_argument("--data", type=Path, metavar="FILE", help="CSV, Parquet, .npz, .npy or IDX")
    gives.add_argument("--labels", type=Path, metavar="FILE", help="where FILE holds one array only")
    gives.add_argument("--schema", type=Path, metavar="FILE", help="what its columns are; uvcc data infer writes one")
    gives.add_argument("--weights", type=Path, metavar="FILE", help="a model's weights, where the job answers queries")
    back = actions.add_parser("results", help="fetch what a run sealed to this owner, hold it to the receipt, open it")
    back.add_argument("proposal", metavar="PROPOSAL", help="its id, or the beginning of it")
    back.add_argument("--from", dest="handed", type=Path, metavar="FOLDER", help="handed over by a domain, not fetched")
    back.add_argument("--base", type=Path, metavar="FILE", help="the job's public base, where it has one")
    back.add_argument("--out", type=Path, metavar="FOLDER", help="a new folder; results-PROPOSAL without it")
    replay = actions.add_parser("audit", help="replay a run that revealed its seeds; name the party that strayed")
    replay.add_argument("run", type=Path, metavar="FOLDER", help="its policy, transcripts and seeds; of any topology")
    replay.add_argument("--sealed", type=Path, metavar="FOLDER", help="what was sealed, if not by uvcc owner share")
    replay.add_argument("--json", action="store_true", help="print JSON on standard output")
    gives.add_argument("--yes", action="store_true", help="share without asking a person")
    for parser_ in (pins, asked, gives, back, replay):
        parser_.add_argument("--owner", type=Path, metavar="FOLDER", help="the owner's folder, if not the usual one")
    for parser_ in (asked, gives, back):
        add_relay(parser_, required=parser_ is not back)
    opened = actions.add_parser("open", help="open the weights, or the answers, that the run sealed to the owner's key")
    opened.add_argument("run", nargs="?", default="last", metavar="RUN")
    opened.add_argument("--out", type=Path, metavar="FOLDER", help="a new folder; the run's name without it")
    opened.add_argument("--unverified", action="store_true", help="open them although the run is not verified")
    predict = actions.add_parser("predict", help="predict in clear with opened weights: CSV in, CSV out")
    predict.add_argument("--model", required=True, metavar="FOLDER", help="what `uvcc owner open` wrote")
    predict.add_argument("--schema", metavar="FILE", help="a fitted schema, if not the one that lies in FOLDER")
    predict.add_argument("--data", required=True, metavar="FILE", help="a CSV file with the schema's columns")
    predict.add_argument("--out", metavar="FILE", help="where the predictions go; standard output without it")
    args = parser.parse_args(argv)
    verbs = {"init": _init, "pin": _pin, "requests": _requests, "share": _share}
    verbs |= {"results": _results, "audit": _audit, "open": _open, "predict": _predict}
    return verbs[args.action](args)


def _init(args: argparse.Namespace) -> int:
    folder = data_owner.home(args.folder)
    made = data_owner.create(folder)
    common.say(f"the owner's key: {folder}; a proposal names {folder / data_owner.PUBLIC}")
    tell_key(made.public.ed25519)
    return OK


def _pin(args: argparse.Namespace) -> int:
    for key in data_owner.pin(data_owner.home(args.owner), args.keys):
        common.show(f"{fingerprint(key)}  {key}")
    return OK


def _requests(args: argparse.Namespace) -> int:
    base = data_owner.home(args.owner)
    owner, pins = Identity.load(base), data_owner.pinned(base)
    there = meeting(args)
    data_owner.announce(there, owner)
    found, twice = data_owner.requests(there, owner.public)
    rows: list[dict[str, Any]] = []
    for standing in found:
        p = standing.signed.proposal
        try:
            data_owner.approved(standing, pins, time.time())
            trouble = ""
        except ConfigError as e:
            trouble = e.what
        told = {"proposal": p.id, "name": p.name, "reveals": [[r.value, r.to] for r in p.reveal], "trouble": trouble}
        rows.append({**told, "place": p.owners.index(owner.public.ed25519)})
        if not args.json:
            common.show("\n".join(screen(standing)) + f"\n{'NOT YET' if trouble else 'ready':<13}{trouble}\n")
    if args.json:
        common.emit({"requests": rows, "equivocations": [tale.to_json() for tale in twice]})
    elif not rows:
        common.say("no proposal there names this owner")
    for tale in twice:
        common.say(f"the coordinator {fingerprint(tale.coordinator)} signed two texts as one proposal")
    return FAILED if twice else OK


def _share(args: argparse.Namespace) -> int:
    base = data_owner.home(args.owner)
    owner, pins = Identity.load(base), data_owner.pinned(base)
    there = meeting(args)
    request = data_owner.waited(there, args.proposal, owner, pins, args.attempt, args.wait, common.say)
    p = request.proposal
    common.show("\n".join(screen(request.standing)))
    for party in range(PARTIES):
        pods = ", ".join(f"{pod.pod} {pod.identity.x25519[:12]}" for pod in request.rosters[party].pods)
        common.show(f"pods of P{party}   {pods} (signed by its domain)")
    place = "first: results that go to the owner are sealed to it" if not request.number else f"number {request.number}"
    common.show(f"this owner   {place}; attempt {request.attempt}")
    join = ColumnJoin.of_job(p.job)
    if join is not None:
        common.show("\n".join(owner_joining.screen(join, request.number)))
    if not args.yes:
        if not sys.stdin.isatty():
            raise ConfigError("nobody is there to ask", "share at a terminal, or say --yes")
        if not common.agreed(f"Share your rows for {p.name}?"):
            return FAILED
    named = {"--data": args.data, "--labels": args.labels, "--schema": args.schema, "--weights": args.weights}
    files = [part for flag, path in named.items() if path is not None for part in (flag, str(path.expanduser()))]
    kept = data_owner.folder_of(base, request) / data_owner.RECEIPT
    if kept.exists():
        common.show(f"not read     {', '.join(files[1::2]) or 'any file'}: {_SHARED_BEFORE.format(request.attempt)}")
    joined = owner_joining.found(there, base, request, files, owner, args.wait, common.say) if join is not None else ""
    share = data_owner.sealed(base, request, files, owner, common.bar, joined)
    data_owner.send(there, base, request, share, common.bar)
    rows = ", ".join(f"{count} {kind} rows" for kind, count in sorted(share.rows.items()))
    common.show(f"shared       {rows}; the receipt: {kept}")
    common.show(f"results      once the run has ended, for {owner_results.KEPT_DAYS} days: uvcc owner results")
    return OK


def _results(args: argparse.Namespace) -> int:
    base = data_owner.home(args.owner)
    owner, pins = Identity.load(base), data_owner.pinned(base)
    kept, share = data_owner.kept(base, args.proposal, owner)
    number = share.owners.index(owner.public.x25519)
    out: Path = args.out or Path(f"results-{share.proposal[:12]}")
    if out.exists():
        raise ConfigError(f"{out} is there already", "name another folder with --out")
    handed: Path = args.handed or kept / "results"
    if args.handed is None:
        if not args.relay or not args.token_file:
            raise ConfigError("neither a relay nor a folder is named", "--relay and --token-file, or --from FOLDER")
        owner_results.fetch(meeting(args), share, number, handed)
    holds = owner_results.verified if args.handed else owner_results.settled
    found = holds(handed, share, number, pins)
    common.show(found.certificate.text())
    common.show("receipt      it is of the rows that this owner shared, on the pods that it sealed them to")
    if number:
        common.show("results      are sealed to the first owner")
        return OK
    if not any(value in ("weights", "predictions") for value, _ in found.policy.reveal):
        common.show("results      the run reveals none")
        return OK
    model: Any = found.policy.job.get("model", "")
    if (named := str(found.policy.job.get("base", ""))) and args.base is None:
        raise ConfigError(f"the weights belong to the public base {named[:12]}", "name its file with --base")
    try:
        out.mkdir(mode=0o700)
    except OSError as e:
        raise ConfigError(f"cannot create {out}: {e.strerror}", "name another folder with --out") from e
    with tempfile.TemporaryDirectory() as scratch:
        command = ["--open", str(handed), "--owner", str(base), "--out", str(out)]
        command += _whose(found.policy, Path(scratch))
        command += ["--base", str(args.base), "--base-sha256", named] if named else []
        command += _column_names(kept / FITTED)
        said = owners_program([*command, "--model", model if isinstance(model, str) else json.dumps(model)], "share")
    if not (out / MODEL).exists():  # with a base it is the merged model's
        (out / MODEL).write_text(json.dumps(model, indent=1, sort_keys=True) + "\n")
    _about_statistics(found.policy)
    give_fitted(kept / FITTED, out)
    common.show(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    _about_coefficients(out, said)
    return OK


def _whose(policy: Policy, scratch: Path) -> list[str]:
    """Which run's results the owner's program may open, and who sealed them."""
    parties, agreed = scratch / "sealed_by.json", scratch / POLICY_FILE
    parties.write_text(owner_results.parties_file(policy))
    agreed.write_bytes(policy.canonical)
    return ["--parties", str(parties), "--policy", str(agreed)]


def _column_names(fitted: Path) -> list[str]:
    """The fitted schema, by which a regression's coefficients get the columns' names."""
    return ["--schema", str(fitted)] if fitted.exists() else []


def _about_coefficients(out: Path, said: str) -> None:
    """Show a regression's coefficients with their standard errors, and what the owner's program says of them."""
    if (file := out / owner_files.COEFFICIENTS).exists():
        rows = [line.rsplit(",", 3) for line in file.read_text().splitlines()]
        wide = max(len(row[0]) for row in rows)
        for name, *numbers in rows:
            common.show(f"{name:<{wide}}" + "".join(f"{number:>16}" for number in numbers))
    for note in json.loads(said).get("notes", []):
        common.say(note)


def _about_statistics(policy: Policy) -> None:
    """Say so where the weights are of standardised columns, and by which statistics was not revealed."""
    if policy.job.get("standardise") and "statistics" not in {value for value, _ in policy.reveal}:
        common.say("the weights are of columns that were standardised under sharing; by what was not to be revealed")


def _audit(args: argparse.Namespace) -> int:
    """Exit codes: 0 every party kept to the program, 1 one strayed, 2 it cannot be told."""
    base, sealed = data_owner.home(args.owner), args.sealed
    if sealed is None:
        policy = Policy.load(args.run / POLICY_FILE)
        if not policy.proposal:
            raise ConfigError("the run was not started from a proposal", "--sealed names what was sealed for it")
        sealed, _ = data_owner.kept(base, policy.proposal, Identity.load(base))
    command = [str(args.run), "--owner", str(base), "--sealed", str(sealed), *(["--json"] if args.json else [])]
    return subprocess.run([sys.executable, "-m", "uvcc_engine.cli", "audit", *command], check=False).returncode


def _open(args: argparse.Namespace) -> int:
    run_dir = common.find_run(args.run)
    out: Path = args.out or Path(run_dir.name)
    s = common.load_summary(run_dir)
    result = shown(s, FULL, recheck(run_dir, s))
    if not result.verified and not args.unverified:
        hint = f"see uvcc verify {run_dir.name}; --unverified opens it all the same"
        raise ConfigError(f"the full run of {run_dir.name} is not verified", hint)
    artifacts, identity = run_dir / "artifacts" / FULL, run_dir / "owner" / "identity"
    if not (artifacts / POLICY_FILE).exists() or not identity.is_dir():
        raise UnreadableError(
            f"{run_dir.name} has no results for a data owner here", "the owner's machine has the keys"
        )
    policy = Policy.load(artifacts / POLICY_FILE)
    revealed = {value for value, _ in policy.reveal}
    if not revealed & {"weights", "predictions"}:
        what = f"{run_dir.name} reveals neither weights nor predictions"
        raise ConfigError(what, "list weights in job.reveal of the next run")
    model: Any = policy.job.get("model", "")
    try:
        out.mkdir(mode=0o700)
    except OSError as e:
        raise ConfigError(f"cannot create {out}: {e.strerror}", "name another folder with --out") from e
    try:
        said = _put_results(run_dir, policy, model, out)
        if "weights" in revealed:
            files = [path.name for path in out.iterdir()]
            (out / CARD).write_text(model_card(policy, result, files, _course(policy, artifacts)))
    except UvccError:
        shutil.rmtree(out, ignore_errors=True)
        raise
    common.show(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    _about_coefficients(out, said)
    return OK


def _course(policy: Policy, artifacts: Path) -> Course | None:
    """How the training went, where its validation decided something. Raises UnreadableError."""
    if not policy.job.get("patience") and not policy.job.get("keep_best"):
        return None
    return read_bundle(artifacts / BUNDLE, lambda found: found.hash == policy.hash).course


def _put_results(run_dir: Path, policy: Policy, model: Any, out: Path) -> str:
    """Open them into ``out``; what the owner's program said, as JSON."""
    name = model if isinstance(model, str) else json.dumps(model)
    with tempfile.TemporaryDirectory() as scratch:
        command = ["--open", str(run_dir / "artifacts" / FULL), "--owner", str(run_dir / "owner" / "identity")]
        named = str(policy.job.get("base", ""))
        command += ["--base", str(run_dir / owner_files.BASE), "--base-sha256", named] if named else []
        command += [*_column_names(fitted_file(run_dir)), *_whose(policy, Path(scratch))]
        said = owners_program([*command, "--out", str(out), "--model", name], "share")
    if not (out / MODEL).exists():  # with a base it is the merged model's
        (out / MODEL).write_text(json.dumps(model, indent=1, sort_keys=True) + "\n")
    _about_statistics(policy)
    give_fitted(fitted_file(run_dir), out)
    return said


def _predict(args: argparse.Namespace) -> int:
    command = ["predict", "--model", args.model, "--data", args.data]
    command += ["--schema", args.schema] if args.schema else []
    command += ["--out", args.out] if args.out else []
    said = owners_program(command)
    if not args.out:
        common.hand_out(said.rstrip("\n"))
        return OK
    found: dict[str, Any] = json.loads(said)
    if "classes" in found:
        counts = ", ".join(f"{count} {name}" for name, count in found["classes"].items())
    elif "clusters" in found:
        counts = ", ".join(f"{count} in cluster {name}" for name, count in found["clusters"].items())
    else:
        counts = f"{found['from']:.6g} to {found['to']:.6g}"
    common.show(f"{args.out}: {found['rows']} rows ({counts})")
    return OK
