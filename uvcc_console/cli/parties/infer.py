"""``uvcc infer``: a client of a model that three domains serve: its key, a ticket from the operator, questions."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from uvcc_console.cli import common
from uvcc_console.cli.main import OK
from uvcc_console.core import paths
from uvcc_console.halt import relay_path
from uvcc_console.plan.owndata import owners_program, owners_program_that_waits
from uvcc_console.plan.plan import FULL
from uvcc_console.rollout.stages.links.relay import CLIENTS_FILE
from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.run_files.files import write_atomic
from uvcc_engine.transcript.proof.bundle import POLICY_FILE, SIGNATURES_FILE
from uvcc_engine.transcript.terms.policy import Policy, read_signatures

KEY = "client"


def run(argv: list[str]) -> int:
    parser = common.Parser("infer", "A client of a served model (job.task: serve): ask, and read the answers alone.")
    actions = parser.add_subparsers(dest="action", required=True, parser_class=common.VerbParser)
    init = actions.add_parser("init", help="make a client's key; whoever has its folder reads the answers")
    init.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="a new folder, for the client's eyes only")
    ticket = actions.add_parser("ticket", help="what a client needs to ask: the relay, its token there, the policy")
    ticket.add_argument("run", nargs="?", default="last", metavar="RUN", help="run id, unique prefix, last or current")
    ticket.add_argument("--client", type=int, default=0, metavar="N", help="its place in job.clients (0)")
    ticket.add_argument("--out", type=Path, metavar="FILE", help="a new file; client-N.ticket without it")
    ask = actions.add_parser("ask", help="ask about every row of a file; the answers as CSV")
    ask.add_argument("served", metavar="TICKET|RUN", help="a ticket's file, or a run of this machine")
    ask.add_argument("--client", type=int, default=0, metavar="N", help="with a run: the place in job.clients (0)")
    ask.add_argument("--data", type=Path, required=True, metavar="FILE", help="CSV with --schema, .npz, .npy or IDX")
    ask.add_argument("--schema", type=Path, metavar="FILE", help="the fitted schema of the model's training")
    ask.add_argument("--out", type=Path, metavar="FILE", help="where the answers go; standard output without it")
    ask.add_argument("--policy", default="", metavar="HASH", help="the policy's hash, if known: no other is asked")
    ask.add_argument("--wait", type=float, default=300.0, metavar="S", help="so long without an answer at most (300)")
    ask.add_argument("--key", type=Path, metavar="FOLDER", help="the client's folder, if not the usual one")
    args = parser.parse_args(argv)
    return {"init": _init, "ticket": _ticket, "ask": _ask}[args.action](args)


def home(given: Path | None) -> Path:
    """The folder of the client's key."""
    return given.expanduser() if given is not None else paths.config_dir() / KEY


def _init(args: argparse.Namespace) -> int:
    folder = home(args.folder)
    if folder.exists():
        raise ConfigError(f"{folder} is there already", "name another folder, or use the key that lies there")
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = json.loads(owners_program(["key", str(folder)], "ask"))
    common.say(f"the client's key: {folder}; the operator lists it in job.clients:")
    common.hand_out(made["key"])
    return OK


def made_ticket(run_dir: Path, client: int) -> dict[str, Any]:
    """The ticket of one client of a run that serves. Raises UnreadableError, ConfigError for a run that does not."""
    folder = run_dir / "artifacts" / FULL
    if not (folder / POLICY_FILE).exists():
        raise UnreadableError(f"{run_dir.name} has no policy yet", "wait until its full phase has begun")
    policy = Policy.load(folder / POLICY_FILE)
    clients = policy.job.get("clients") or []
    if policy.job.get("task") != "serve":
        raise ConfigError(f"{run_dir.name} serves no model", "its job's task is not serve")
    if not 0 <= client < len(clients):
        raise ConfigError(f"there is no client {client}", f"job.clients lists {len(clients)}, from 0")
    found = next(iter(relay_path.mailboxes(run_dir, f"{run_dir.name}.{FULL}")), None)
    tokens = run_dir / relay_path.FOLDER / f"{FULL}{CLIENTS_FILE}"
    if found is None or not tokens.exists():
        raise UnreadableError(f"{run_dir.name} has no relay yet", "wait until its full phase has begun")
    return {
        "relay": found.url,
        "group": found.group,
        "token": json.loads(tokens.read_text())[client],
        "client": client,
        "policy": policy.to_json(),
        "signatures": {str(p): text for p, text in read_signatures(folder / SIGNATURES_FILE).items()},
        "ca": Path(found.ca_file).read_text() if found.ca_file else "",
    }


def _ticket(args: argparse.Namespace) -> int:
    made = made_ticket(common.find_run(args.run), args.client)
    out: Path = args.out or Path(f"client-{args.client}.ticket")
    if out.exists():
        raise ConfigError(f"{out} is there already", "name another file with --out")
    write_atomic(out, json.dumps(made).encode(), mode=0o600)
    common.show(f"{out}: for client {args.client} alone, who holds the key; it has this client's token at the relay")
    return OK


def _ask(args: argparse.Namespace) -> int:
    given = Path(args.served).expanduser()
    with tempfile.TemporaryDirectory(prefix="uvcc-infer-") as scratch:
        if not given.is_file():
            given = Path(scratch) / "ticket"
            write_atomic(given, json.dumps(made_ticket(common.find_run(args.served), args.client)).encode(), mode=0o600)
        command = ["rows", "--ticket", str(given), "--key", str(home(args.key)), "--data", str(args.data)]
        command += ["--schema", str(args.schema)] if args.schema else []
        command += ["--out", str(args.out)] if args.out else []
        command += ["--policy", args.policy] if args.policy else []
        said = owners_program_that_waits([*command, "--wait", f"{args.wait:g}"], "ask", common.say)
    if not args.out:
        common.hand_out(said.rstrip("\n"))
        return OK
    found = json.loads(said)
    common.show(
        f"{args.out}: {found['rows']} rows in {found['seconds']:.1f} s, {found['rows_per_s']:.1f} rows/s; half of"
        f" {found['queries']} queries within {found['p50_s']:.2f} s, 95 % within {found['p95_s']:.2f} s"
    )
    common.show(f"policy       {found['policy']}")
    return OK
