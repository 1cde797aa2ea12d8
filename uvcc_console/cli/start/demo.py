"""``uvcc demo``: the whole story on local pods."""

from __future__ import annotations

import argparse
from typing import Final

from uvcc_console.cli import common
from uvcc_engine.contract.machine.raising_parser import natural

LM_PROFILE: Final = "local-lm-smoke"
LM_HALTED_AT: Final = 50  # of its 120 steps, with a checkpoint every 40: a few are done twice
_CALLED: Final = {"kmeans": "[{kmeans: 3}]", "trees": "[{trees: 20}]"}
_NOT_OF_LM: Final = ("replicas", "link", "profile", "data", "target", "schema", "model")


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "demo",
        "Train privately on three local pods: smoke with halt drill, verify, full run, verify, collect, tear down. "
        "Exits 0 only if the run is verified.",
    )
    parser.add_argument("--headless", action="store_true", help="progress line instead of the console")
    parser.add_argument(
        "--federated", action="store_true", help="three domains, two data owners and an auditor, each by itself"
    )
    parser.add_argument("--tmux", action="store_true", help="with --federated: a pane for each of them")
    parser.add_argument("--users", action="store_true", help="with --federated: only with OS users of their own")
    parser.add_argument("--port", metavar="N", help="with --federated: of its relay, else a free one")
    parser.add_argument("--replicas", type=int, metavar="R", help="replicas per party (1)")
    parser.add_argument("--steps", type=natural, metavar="N", help="training steps of the full run")
    parser.add_argument("--seed", type=int, metavar="N", help="repeatable identities, shares and roots")
    parser.add_argument("--link", choices=["auto", "direct", "relay", "stream"], help="how parties reach each other")
    parser.add_argument("--profile", default="demo", metavar="NAME", help="another profile than `demo`")
    parser.add_argument("--lm", action="store_true", help="the language model's story: halt, exact resume, a text")
    parser.add_argument("--data", metavar="FILE", help="the same story on your own CSV file, instead of on digits")
    parser.add_argument("--target", default="", metavar="COLUMN", help="of FILE: the column to learn")
    parser.add_argument("--schema", default="", metavar="FILE", help="what the columns are; else read from the data")
    parser.add_argument(
        "--model", metavar="MODEL", help="a name, or layers like '[{linear: 16}, relu, linear]'; trees, kmeans"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress, only the summary")
    parser.add_set()
    parser.add_json()
    args = parser.parse_args(argv)
    if args.federated:
        return _federated(parser, args)
    if args.tmux or args.users or args.port:
        parser.error("--tmux, --users and --port are of --federated")
    if args.lm:
        if wrong := [k for k in _NOT_OF_LM if getattr(args, k) != parser.get_default(k)]:
            parser.error(f"--lm takes no --{wrong[0]}")
        args.profile = LM_PROFILE
    if args.seed is not None and args.seed < 0:
        parser.error("--seed wants a number that is not negative")
    settings = list(args.set)
    if args.data:
        args.model = _CALLED.get(args.model, args.model)
    if args.data:
        from uvcc_console.cli.parties.data import settings_for

        settings = [*settings_for(args.data, args.schema, args.target, args.model or ""), *settings]
    elif args.schema or args.target:
        parser.error("--schema and --target describe the file of --data")
    if args.model:
        settings.append(f"job.model={args.model}")
    if args.replicas is not None:
        settings.append(f"topology.replicas={args.replicas}")
    if args.lm and (args.steps is None or args.steps > 2 * LM_HALTED_AT):
        settings.append(f"gates.resume_at={LM_HALTED_AT}")
    if args.steps is not None:
        settings.append(f"job.steps={args.steps}")
    if args.link:
        settings.append(f"link={args.link}")
    from uvcc_console.cli.screen.launch import has_terminal, launch

    tui = has_terminal() and not (args.headless or args.json or args.quiet)
    return launch(args.profile, settings, name="demo", seed=args.seed, tui=tui, as_json=args.json, quiet=args.quiet)


def _federated(parser: common.Parser, args: argparse.Namespace) -> int:
    """The story of three domains; it has a job of its own, so what changes the plain demo's does not go with it."""
    own = {"federated", "headless", "tmux", "users", "port"}
    if more := sorted(k for k, v in vars(args).items() if k not in own and v != parser.get_default(k)):
        parser.error(f"--federated takes no --{more[0]}")
    from uvcc_console.cli.screen.federated import play

    return play(users=args.users, tmux=args.tmux, headless=args.headless, listen=args.port or "0")
