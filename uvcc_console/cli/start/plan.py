"""``uvcc plan PROFILE``: what a rollout would do, cost and reveal, before anything is rented."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from uvcc_console.cli import common
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.machine import host
from uvcc_engine.contract.text import counted

if TYPE_CHECKING:
    from uvcc_console.plan.plan import Plan


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "plan",
        "Say what a rollout would do, reveal and cost. Of a private job three steps are rehearsed on this machine with "
        "made-up rows. Nothing is rented, and no provider is asked.",
    )
    parser.add_argument("profile", metavar="PROFILE", help="name or path, see: uvcc profiles")
    parser.add_set()
    parser.add_argument("--rtt", type=float, metavar="MS", help="round trip between the parties (20; local pods 0)")
    parser.add_argument("--mbit", type=float, metavar="N", help="what a party's line carries (1000; local pods: none)")
    whose = "data owners share the rows from their own machines, as `uvcc propose --owner` asks"
    parser.add_argument("--elsewhere", action="store_true", help=whose)
    parser.add_argument("--no-rehearsal", action="store_true", help="only what the profile says")
    parser.add_json()
    args = parser.parse_args(argv)
    if not (0 <= (args.rtt or 0) < math.inf and 0 < (1 if args.mbit is None else args.mbit) < math.inf):
        parser.error("--rtt wants milliseconds, --mbit a rate above 0")
    found = document(args)
    if args.json:
        common.emit_line(found)
    else:
        common.show("\n".join(lines(found)))
    return 0


def document(args: argparse.Namespace) -> dict[str, Any]:
    """The plan as data. Raises UvccError for a profile, data or a model that does not fit."""
    from uvcc_console.plan import long_steps, plan_refusals, plan_rehearsal
    from uvcc_console.plan.owndata import settle
    from uvcc_console.plan.plan import make_plan, new_run_id
    from uvcc_console.plan.profile import load

    told: list[str] = []
    short, profile = load(args.profile, args.set)
    profile, _ = settle(profile, told.append, elsewhere=args.elsewhere)
    plan = make_plan(new_run_id(short), short, profile)
    plan_refusals.check(plan)
    found = _said(plan)
    found["notes"] = [*told, *filter(None, [found.pop("doubt", "")])]
    full = plan.phases["full"]
    if plan_rehearsal.applies(plan) and not args.no_rehearsal:
        found["step"] = step = plan_rehearsal.rehearsed(plan)
        found["frac_bits"] = full.job.get("frac_bits")
        links = plan_rehearsal.links(plan, args.rtt, args.mbit)
        found["foretold"] = over = plan_rehearsal.foretold(plan_rehearsal.step_of(plan, step, links), full.steps, links)
        found["epochs"] = epochs = getattr(profile.job, "epochs", 0)
        over["hours_cap"] = over["full_s"] / 3600 * profile.limits.hourly
        if epochs:
            over |= {"epoch_s": over["full_s"] / epochs, "epoch_cap": over["hours_cap"] / epochs}
        found["notes"] += step.pop("warnings")
        step["pod_gib"], short = plan_rehearsal.memory(plan, step, host.memory_mib()["available_mib"])
        found["notes"] += [short] if short else []
    found["notes"] += long_steps.fitted(profile, found["foretold"]["step_s"] if "foretold" in found else 0.0)[1]
    return found


def _said(plan: Plan) -> dict[str, Any]:
    """What the profile alone decides."""
    from uvcc_console.plan import code_tree, command_halt
    from uvcc_console.plan.plan import revealed_values
    from uvcc_console.plan.schema import CommandJobSettings

    profile, full = plan.profile, plan.phases["full"]
    t = full.topology
    found: dict[str, Any] = {
        "profile": plan.profile_name,
        "job": full.kind,
        "stages": list(plan.stages),
        "pods": len(plan.requests),
        "provider": profile.fleet.where,
        "workers": len(full.coords()),
        "topology": {"replicas": t.replicas, "stages": t.stages, "tensor": t.tensor, "microbatches": t.microbatches},
        "steps": {name: phase.steps for name, phase in plan.phases.items()},
        "cap": {"hourly": profile.limits.hourly, "total": profile.limits.total, "ttl_s": profile.limits.ttl},
        "wait_s": profile.limits.wait,
        "resumes": profile.limits.resumes,
    }
    job = profile.job
    if isinstance(job, CommandJobSettings):
        found["halt"] = job.halt
        tree = code_tree.survey(job) if job.code else None
        found["doubt"] = command_halt.doubt(job, tree)
        if tree is not None:
            found["code"] = tree.record() | {"setup": job.setup, "artifacts": job.artifacts, "words": tree.words}
    if full.kind == "private":
        model = full.job["model"]
        found["model"] = model if isinstance(model, str) else model.get("name", "a list of layers")
        found["reveal"] = revealed_values(full.job)
        found["task"] = full.job.get("task", "train")
    return found


def _where(step: dict[str, Any], over: dict[str, float]) -> str:
    """What the seconds hold of the links."""
    if not over["bytes_s"]:
        return f": the pods share {step['processes']['cores']:g} processors of this machine"
    share = 100 * over["network_s"] / over["step_s"]
    return f": {share:.0f} % of it on links of {1e3 * over['rtt_s']:g} ms and {8 * over['bytes_s'] / 1e6:g} Mbit/s"


def _counts(step: dict[str, Any], workers: int) -> str:
    """Rounds, bytes and computing of a step: of a party's one worker, or of all workers of several."""
    cpu = f"{step['processes']['party_cpu']:.3f} s"
    if (fleet := step.get("fleet")) is None:
        most = f"{step['bytes'] * step['busiest'] / 1e6:.2f} MB of them from the one that sends most"
        rounds, sent = f"{step['rounds']:.0f} rounds", f"{step['bytes'] * PARTIES / 1e6:.2f} MB of all parties, {most}"
        whose = "" if workers == PARTIES else ", as one worker per party would take"
        return f"a step     {rounds}, {sent}, and {cpu} of one processor for the party with most to do{whose}"
    rounds = f"{fleet['rounds']:.0f} rounds at the worker with most, {fleet['chain']:.0f} messages in the longest chain"
    return f"a step     {rounds}, {fleet['bytes'] / 1e6:.2f} MB of all workers, and {cpu} of computing for a party"


def _of_model(found: dict[str, Any]) -> str:
    """What a private job does with its model."""
    does = {"train": "training of", "infer": "answers by", "serve": "service of"}
    return f" {does[found['task']]} {found['model']}" if "model" in found else ""


def _timed(step: dict[str, Any]) -> str:
    """How many workers were timed."""
    return "three" if "fleet" not in step else f"{step['processes']['workers']}"


def lines(found: dict[str, Any]) -> list[str]:
    """The plan for people."""
    from uvcc_console.plan.command_halt import WORDS

    t, cap, steps = found["topology"], found["cap"], found["steps"]
    split = " ".join(f"{name} {count}" for name, count in t.items() if count > 1)
    spent = f"${cap['total']:g} in all, ${cap['hourly']:g} an hour" if cap["total"] else "nothing"
    told = [
        f"{found['profile']}   {found['job']}{_of_model(found)}",
        f"pods       {found['pods']} at {found['provider']}, {counted(found['workers'], 'worker')}"
        f"{', ' + split if split else ''}",
        "steps      " + ", ".join(f"{count} in the {name} phase" for name, count in reversed(steps.items())),
        f"may cost   {spent}, for {cap['ttl_s'] / 60:g} minutes at most",
        f"stages     {' '.join(found['stages'])}",
    ]
    kept = f"pods are kept {found['wait_s'] / 60:g} minutes for a decision"
    if found["resumes"]:
        often = counted(found["resumes"], "time")
        kept = f"{often} it goes on by itself where a worker was killed or a pod is silent; else {kept}"
    told.append(f"a failure  {kept}")
    if "halt" in found:
        told.append(f"a halt     {WORDS[found['halt']]}")
    if code := found.get("code"):
        told.append(f"uploads    {code['folder']}: {code['words']}")
        told += [f"           not {name}" for name in code["left_out"]]
        told.append(f"setup      {code['setup'] or 'nothing is installed'}")
        told.append(f"brings     {', '.join(code['artifacts']) or 'no files beside those of the run contract'}")
    if "reveal" in found:
        told.append(f"reveals    {', '.join(found['reveal'])}")
    if step := found.get("step"):
        over = found["foretold"]
        told += [
            f"a number   {found['frac_bits']} bits behind the point; what the layers give leaves room for"
            f" {step['most_frac_bits']}",
            _counts(step, found["workers"]),
            f"foretold   {over['step_s']:.2f} s a step ({over['low_s']:.2f} to {over['high_s']:.2f}),"
            f" {over['full_s']:.0f} s for {counted(steps['full'], 'step')}{_where(step, over)}",
            f"           as {_timed(step)} processes took here now, transcript included;"
            " the smoke measures the pods themselves",
        ]
        if step["pod_gib"]:
            told.append(f"memory     {step['pod_gib']:.2f} GiB at most, held by the workers of a pod")
        if "epoch_s" in over:
            each = f"at the hourly cap ${over['epoch_cap']:.2f}" if cap["hourly"] else "for nothing"
            told.append(
                f"an epoch   {counted(steps['full'] // found['epochs'], 'step')}, {over['epoch_s']:.0f} s, {each}"
            )
        if split:
            told += ["", "layers, as one worker per party would compute them:"]
        told += ["", f"{'layer':<20}{'rounds':>8}{'kB a party':>12}{'headroom':>11}"]
        told += [
            f"{one['layer']:<20}{one['rounds']:>8.1f}{one['bytes'] / 1e3:>12.1f}{one['headroom_bits']:>6.0f} bits"
            for one in step["layers"]
        ]
    elif found.get("task", "train") != "train":
        told.append("a step     not foretold: only trainings are rehearsed")
    return [*told, *(f"note: {note}" for note in found["notes"])]
