"""``uvcc resume RUN``: go on from the last common checkpoint, or a chosen one, on the same pods."""

from __future__ import annotations

import time
from pathlib import Path
from subprocess import Popen
from typing import Any

from uvcc_console.cli import common
from uvcc_console.cli.follow import headless
from uvcc_console.cli.main import FAILED, OK
from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import settings_after
from uvcc_console.core.journal.journal import Journal
from uvcc_console.federation import seat
from uvcc_console.halt import certificate
from uvcc_console.plan import changed_settings, lm_settings, worker_secrets
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import parse
from uvcc_console.runs import processes
from uvcc_engine.contract.errors import ConfigError

POLL_S = 0.05
NOT_YET = ("start", "failed", "halted")  # phases of a worker that reads its evidence, or has not come so far
ADOPTION = "adopt"  # the stage in which a new conductor finds its pods


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "resume",
        "Go on from the last common checkpoint (or --from an earlier one) of a halted or failed run, same pods.",
    )
    parser.add_run()
    parser.add_argument("--wait", action="store_true", help="wait until the run ends; exit 0 only if it is verified")
    parser.add_argument("--retry", action="store_true", help="repeat the failed stage from its beginning")
    parser.add_argument("--skip", action="store_true", help="skip the failed stage, where that is safe")
    parser.add_argument(
        "--from",
        dest="start",
        type=int,
        default=-1,
        metavar="STEP",
        help="go on from the checkpoint of this step and set later ones aside; 0 starts over, under the next attempt",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="with a language model: this setting from here on, like train.lr=0.0001; without a value as planned again",
    )
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="how long to wait until it runs")
    parser.add_json()
    args = parser.parse_args(argv)
    run_dir = common.find_run(args.run)
    s = common.load_snapshot(run_dir)
    live = processes.running(run_dir, processes.CONDUCTOR)
    if s.ended:
        raise ConfigError(f"{run_dir.name} has ended ({s.status})", "start a new run")
    stage = s.stage
    waits = stage is not None and stage.status in ("waiting", "failed")
    if live and not waits:
        at = stage.name if stage else s.status
        if s.halt.done and s.halt.mode == "halt" and s.halt.verified < s.halt.total:
            hint = f"uvcc pod {run_dir.name} restart POD ends the workers of a pod that hangs, and resumes"
            raise ConfigError(f"{run_dir.name} was halted, and not every pod has stopped", hint)
        raise ConfigError(f"{run_dir.name} is running ({at}); there is nothing to resume", "F9 or uvcc halt halts it")
    action = "skip" if args.skip else "retry" if args.retry else "resume"
    if args.start >= 0 and (action != "resume" or s.job_kind == "command"):
        why = "a command has no checkpoints to choose from" if s.job_kind == "command" else "it means to resume"
        raise ConfigError(f"--from {args.start} does not go with this", why)
    if args.set and (action != "resume" or s.job_kind != "lm"):
        why = "it means to resume" if s.job_kind == "lm" else f"a {s.job_kind} job's settings are what was agreed"
        raise ConfigError(f"--set {args.set[0]} does not go with this", why)
    changes = changed_settings.parse(args.set)
    if not live:
        worker_secrets.values(s.profile.get("secrets") or ())  # whoever takes the run up hands them to the workers
    if changes:
        plan = make_plan(s.run, s.profile_name, parse(s.profile), s.seed)
        lm_settings.check(plan, settings_after(s.changed_settings, changes))
    if (run_dir / seat.FILE).exists():
        _check_own_part(run_dir, live=bool(live), plain=action == "resume" and args.start < 0)
    if action != "resume" and not live:
        raise ConfigError(f"nobody conducts {run_dir.name}", f"take it up first: uvcc resume {run_dir.name}")
    held = certificate.in_force(run_dir) if args.start < 0 else None
    cited: dict[str, Any] = {"certificate": held.sha256, "nonce": held.nonce} if held is not None else {}
    if args.start >= 0:
        cited = {"from": args.start}
    if changes:
        cited["set"] = changes
    with headless.interruptible() as received:
        child = headless.ask(run_dir, action, **cited)
        if args.wait:
            watched = headless.follow(run_dir, child, received, progress=not args.json, known=stage)
            return headless.report(watched, run_dir, as_json=args.json)
        lived = s.engine_run if not live and any(w.state == "started" for w in s.workers.values()) else ""
        running = _until_running(run_dir, s.seq, child, args.timeout, lived=lived, quiet=args.json)
    s = common.load_snapshot(run_dir)
    if args.json:
        common.emit({"run": s.run, "running": running, "phase": s.phase, "attempt": s.attempt, "step": s.step})
    elif running:
        common.show(f"{s.run} runs again: {s.phase or (s.stage.name if s.stage else '')} attempt {s.attempt}")
    else:
        stage = s.stage
        why = stage.detail if stage is not None and stage.detail and not s.ended else s.detail
        unheard = f"nothing was heard of its workers in {args.timeout:.0f} s; see: uvcc status {s.run}"
        common.say(f"{s.run} does not run: {why or unheard}")
    return OK if running else FAILED


def _check_own_part(run_dir: Path, *, live: bool, plain: bool) -> None:
    """See that a resume of one domain's part of a run is what one domain can ask for. Raises ConfigError."""
    if not live:
        hint = "uvcc teardown ends it here; the three domains begin the next attempt with uvcc rollout --domain"
        raise ConfigError(f"nobody conducts {run_dir.name}, one domain's part of a run", hint)
    if not plain:
        hint = "uvcc resume RUN signs to go on from the last common checkpoint"
        raise ConfigError("one domain alone does not choose where three go on", hint)


def _until_running(
    run_dir: Path, seq: int, child: Popen[bytes] | None, limit: float, *, lived: str, quiet: bool = False
) -> bool:
    """Wait for a heartbeat of a worker that trains after the resumed phase began, or for a later stage to begin.

    ``lived``: the engine run whose workers may have gone on while nobody conducted them; then no phase begins, and
    their stage is entered again. Whom the new conductor waits for is said meanwhile.
    """
    journal = Journal(run_dir / processes.JOURNAL, readonly=True)
    end, started, entered = time.monotonic() + limit, False, False
    try:
        while time.monotonic() < end:
            dead = not processes.conducted(run_dir) and (child is None or child.poll() is not None)
            batch = list(journal.since(seq))
            seq = batch[-1][0] if batch else seq
            for _, event in batch:
                if isinstance(event, ev.PhaseStarted):
                    started = True
                elif isinstance(event, ev.WorkerProcess):
                    lived = "" if event.state != "started" and event.engine_run == lived else lived
                elif isinstance(event, ev.HeartbeatRead):
                    if (started or (lived and entered)) and event.record.get("phase") not in NOT_YET:
                        return True
                elif isinstance(event, ev.Consent) and not quiet:
                    common.say(f"{event.by} signed for {event.what}")
                elif isinstance(event, ev.ActionDone) and event.action == "resume" and not event.ok:
                    raise ConfigError(event.detail)
                elif isinstance(event, ev.StageChanged) and event.name == ADOPTION:
                    if event.status == "waiting" and not quiet:
                        common.say(f"waiting: {event.detail}")
                elif isinstance(event, ev.StageChanged) and event.name != "teardown":
                    if event.status == "ok":
                        return True
                    entered |= event.status == "running"
                    if event.status == "failed" and (started or entered):
                        return False
                elif isinstance(event, ev.RunEnded):
                    return event.status == "ok"
            if dead:
                return False
            time.sleep(POLL_S)
    finally:
        journal.close()
    return False
