"""``uvcc owner init|open|predict``: the data owner's key, and what it opens of a finished run."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from uvcc_console.cli import common
from uvcc_console.cli.main import OK
from uvcc_console.core.shown import shown
from uvcc_console.plan.owndata import fitted_file, owners_program
from uvcc_console.plan.plan import FULL
from uvcc_console.report.model_card import model_card
from uvcc_console.report.recheck import recheck
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError
from uvcc_engine.transcript.proof.bundle import POLICY_FILE
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy

MODEL, FITTED, CARD = "model.json", "preprocessing.yaml", "MODEL_CARD.md"


def run(argv: list[str]) -> int:
    parser = common.Parser("owner", "The data owner's side: a key, a finished run's results, and their use in clear.")
    actions = parser.add_subparsers(dest="action", required=True, parser_class=argparse.ArgumentParser)
    init = actions.add_parser("init", help="make a data owner's key; whoever has its folder opens the results")
    init.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder, for the owner's eyes only")
    opened = actions.add_parser("open", help="open the weights that the run sealed to the owner's key")
    opened.add_argument("run", nargs="?", default="last", metavar="RUN")
    opened.add_argument("--out", type=Path, metavar="FOLDER", help="a new folder; the run's name without it")
    opened.add_argument("--unverified", action="store_true", help="open them although the run is not verified")
    predict = actions.add_parser("predict", help="predict in clear with opened weights: CSV in, CSV out")
    predict.add_argument("--model", required=True, metavar="FOLDER", help="what `uvcc owner open` wrote")
    predict.add_argument("--schema", metavar="FILE", help="a fitted schema, if not the one that lies in FOLDER")
    predict.add_argument("--data", required=True, metavar="FILE", help="a CSV file with the schema's columns")
    predict.add_argument("--out", metavar="FILE", help="where the predictions go; standard output without it")
    args = parser.parse_args(argv)
    return {"init": _init, "open": _open, "predict": _predict}[args.action](args)


def _init(args: argparse.Namespace) -> int:
    folder: Path = args.folder
    if folder.exists():
        raise ConfigError(f"{folder} is there already", "an owner's key is made once; name a new folder")
    made = Identity.create(folder)
    common.say(f"the owner's key: {folder}; give {folder / 'public.json'} to the other owners")
    common.show(made.public.x25519)
    return OK


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
    if not any(value == "weights" for value, _ in policy.reveal):
        raise ConfigError(f"{run_dir.name} reveals no weights", "list weights in job.reveal of the next run")
    model: Any = policy.job.get("model", "")
    try:
        out.mkdir(mode=0o700)
    except OSError as e:
        raise ConfigError(f"cannot create {out}: {e.strerror}", "name another folder with --out") from e
    try:
        _put_results(run_dir, policy, model, out)
        (out / CARD).write_text(model_card(policy, result, [path.name for path in out.iterdir()]))
    except UvccError:
        shutil.rmtree(out, ignore_errors=True)
        raise
    common.show(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    return OK


def _put_results(run_dir: Path, policy: Policy, model: Any, out: Path) -> None:
    name = model if isinstance(model, str) else json.dumps(model)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as parties:
        json.dump([party.public.to_json() for party in policy.parties], parties)
        parties.flush()
        command = ["--open", str(run_dir / "artifacts" / FULL), "--owner", str(run_dir / "owner" / "identity")]
        owners_program([*command, "--parties", parties.name, "--out", str(out), "--model", name], "share")
    (out / MODEL).write_text(json.dumps(model, indent=1, sort_keys=True) + "\n")
    fitted = fitted_file(run_dir)
    if fitted.exists():
        shutil.copyfile(fitted, out / FITTED)
        (out / FITTED).chmod(0o600)


def _predict(args: argparse.Namespace) -> int:
    command = ["predict", "--model", args.model, "--data", args.data]
    command += ["--schema", args.schema] if args.schema else []
    command += ["--out", args.out] if args.out else []
    said = owners_program(command)
    if not args.out:
        common.show(said.rstrip("\n"))
        return OK
    found: dict[str, Any] = json.loads(said)
    if "classes" in found:
        counts = ", ".join(f"{count} {name}" for name, count in found["classes"].items())
    else:
        counts = f"{found['from']:.6g} to {found['to']:.6g}"
    common.show(f"{args.out}: {found['rows']} rows ({counts})")
    return OK
