"""The pure reducer: (snapshot, event) -> snapshot. No clock, no I/O, no exceptions for odd input: that is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from uvcc_console.core import events as ev
from uvcc_console.core import pod_states
from uvcc_console.core.folding import bad_records, reported_state
from uvcc_console.core.folding.reducing import LOG_KEEP, changed, logged, put
from uvcc_console.core.series import Series
from uvcc_console.core.snapshot import (
    AGENT_PATHS,
    DomainView,
    FlightView,
    ForecastView,
    ForetoldView,
    GateView,
    HaltView,
    LogEntry,
    PodView,
    Snapshot,
    StageView,
    TriageView,
    VerdictView,
    WorkerView,
)
from uvcc_console.core.words import PODS, ack_words, halt_words, value_words
from uvcc_engine.contract.text import clean, counted

MALFORMED_KEEP = 256


def _created(s: Snapshot, e: ev.RunCreated) -> Snapshot:
    return changed(
        s,
        run=e.run,
        profile_name=e.profile_name,
        profile=MappingProxyType(dict(e.profile)),
        job_kind=e.job_kind,
        created=e.ts,
        replicas=e.replicas,
        pipeline_stages=e.pipeline_stages,
        tensor=e.tensor,
        seed=e.seed,
        patient=e.patient,
        apart=e.apart,
        status="running",
        stages=tuple(StageView(n) for n in e.stages),
    )


def _stage(s: Snapshot, e: ev.StageChanged) -> Snapshot:
    def move(v: StageView) -> StageView:
        started = e.ts if e.status == "running" and v.status != "waiting" else v.started
        ended = e.ts if e.status in ("ok", "failed", "skipped") else 0.0
        return replace(v, status=e.status, detail=e.detail, started=started, ended=ended, until=e.until, again=e.again)

    stages = tuple(move(v) if v.name == e.name else v for v in s.stages)
    if e.name not in {v.name for v in stages}:  # one that no plan has stands before what is still to be done
        done = next((i for i, v in enumerate(stages) if v.status not in ("ok", "skipped")), len(stages))
        stages = (*stages[:done], move(StageView(e.name)), *stages[done:])
    level = "error" if e.status == "failed" else "info"
    text = f"stage {e.name} {e.status}" + (f": {e.detail}" if e.detail else "")
    s = changed(s, stages=stages)
    if e.status in ("failed", "waiting", "ok") and s.triage and not s.triage[-1].outcome:
        made = max((w.step for w in s.workers.values()), default=-1) - s.triage[-1].step
        came = "the stage went through" if e.status == "ok" else f"{counted(max(0, made), 'step')}, then {e.detail}"
        s = changed(s, triage=(*s.triage[:-1], replace(s.triage[-1], outcome=came)))
    if e.status == "failed":
        s = changed(s, status="failed", detail=e.detail)
    elif e.status == "running" and s.status in ("failed", "halted") and e.name != "teardown":
        s = changed(s, status="running", detail="")
    return logged(s, e, level, "rollout", text)


def _gate(s: Snapshot, e: ev.GateMeasured) -> Snapshot:
    kept = tuple(g for g in s.gates if g.name != e.name)
    gate = GateView(e.name, e.ok, e.wanted, e.measured)
    text = f"gate {e.name}: {'ok' if e.ok else 'FAILED'} (wanted {e.wanted}, measured {e.measured})"
    return logged(changed(s, gates=(*kept, gate)), e, "info" if e.ok else "error", "gate", text)


def _pod(s: Snapshot, e: ev.PodChanged) -> Snapshot:
    old = s.pods.get(e.pod)
    if old is not None and old.state == "gone" and e.state != "gone":
        old = None  # another machine under the same name: nothing of what ran on the old one runs there
        s = changed(s, workers=_none_started(s.workers, lambda w: w.pod == e.pod, known=False))
    view = PodView(
        e.pod,
        e.party,
        e.replica,
        e.provider,
        e.state,
        e.address or (old.address if old else ""),
        e.price_hr or (old.price_hr if old else 0.0),
        e.detail,
        e.identity or (old.identity if old else ""),
        e.host_key or (old.host_key if old else ""),
        old.paths if old else MappingProxyType({}),
        old.trouble if old else "",
        old.disk if old else Series(),
    )
    if old is not None:
        view = replace(view, cpu=old.cpu, memory=old.memory, gpu=old.gpu, gpus=old.gpus)
    s = changed(s, pods=put(s.pods, e.pod, view))
    if e.state == "gone":  # also one that was left behind, and ended later
        s = changed(s, leaks=tuple(name for name in s.leaks if name != f"{s.prefix}{e.pod}"))
    level = "error" if e.state in pod_states.BROKEN else "info"
    said = PODS.get(e.state, f"pod {e.state}")
    if e.detail and old is not None and old.state == e.state:  # what is done meanwhile
        return logged(s, e, level, e.pod, e.detail)
    return logged(s, e, level, e.pod, said + (f": {e.detail}" if e.detail else ""))


def _link(s: Snapshot, e: ev.LinkChanged) -> Snapshot:
    pod = s.pods.get(e.pod)
    if pod is None:
        return s
    was, since = pod.paths.get(e.path, (not e.up, e.ts))
    trouble = ("" if e.up else e.detail) if e.path in AGENT_PATHS else pod.trouble
    paths = put(pod.paths, e.path, (e.up, since if was == e.up else e.ts))
    s = changed(s, pods=put(s.pods, e.pod, replace(pod, paths=paths, trouble=trouble)))
    expected = e.up or pod.state in pod_states.LEAVING  # the path of a pod that is deleted ends as it should
    level = "info" if expected else "warn"
    return logged(s, e, level, e.pod, f"path {e.path} {'up' if e.up else 'down'} {e.detail}".rstrip())


def _none_started(
    workers: Mapping[str, WorkerView], of: Callable[[WorkerView], bool] = lambda w: True, *, known: bool = True
) -> Mapping[str, WorkerView]:
    """How the earlier attempt of these workers went or ended no longer counts; ``known``: on the same machines."""

    def anew(w: WorkerView) -> WorkerView:
        earlier = (w.pid or w.earlier) if known else 0
        return replace(w, state="", rc=None, signal="", pid=0, beat_ts=0.0, phase="", earlier=earlier)

    return MappingProxyType({c: anew(w) if of(w) else w for c, w in workers.items()})


def _phase(s: Snapshot, e: ev.PhaseStarted) -> Snapshot:
    fresh = e.engine_run != s.engine_run
    over = fresh or e.masks != s.masks  # started over: other masks, so other messages and roots of the same epochs
    s = changed(
        s,
        phase=e.phase,
        phase_began=e.ts,
        engine_run=e.engine_run,
        attempt=e.attempt,
        resumes=s.resumes + (e.attempt > 0),
        masks=e.masks,
        first_step=max(0, e.first_step),
        steps_planned=e.steps,
        sid_job=e.sid_job,
        halt=HaltView(last_drill_s=s.halt.last_drill_s),
        status="running",
        workers=MappingProxyType({}) if fresh else _none_started(s.workers),
        series=MappingProxyType({}) if fresh else s.series,
        agreement=() if over else s.agreement,
        agreed_epoch=-1 if over else s.agreed_epoch,
        checkpoints=MappingProxyType({}) if over else s.checkpoints,
        home=MappingProxyType({}) if fresh else s.home,
        repeated=MappingProxyType({}) if fresh else s.repeated,
        refused_checkpoints=MappingProxyType({}),
        watchdog_dumps=0,
        failed_proofs=MappingProxyType({}),
        outages=MappingProxyType({}),
        facts=MappingProxyType({}),
        flight=None,
        waits=MappingProxyType({}),
        pairs=MappingProxyType({}),
    )
    resumed = f", resume {e.attempt}" if e.attempt else ""
    sid = f", sid_job {e.sid_job[:12]}" if e.sid_job else ""
    if s.followed:
        return logged(
            s, e, "info", "follow", f"{e.engine_run} is read" + (f": {counted(e.steps, 'step')}" if e.steps else "")
        )
    return logged(s, e, "info", "rollout", f"{e.phase} starts: {counted(e.steps, 'step')}{resumed}{sid}")


def _fork(s: Snapshot, e: ev.ForkDetected) -> Snapshot:
    who = " and ".join(f"P{p}" for p in e.parties)
    text = f"FORK at epoch {e.epoch}: {who} disagree. {e.detail}".rstrip()
    return logged(changed(s, fork=text), e, "error", "ledger", text)


def _halt_requested(s: Snapshot, e: ev.HaltRequested) -> Snapshot:
    if e.nonce == s.halt.nonce:
        by = s.halt.by if e.by == "haltd" else e.by  # the sidecar commits what somebody else asked for
        done = s.halt.done and e.mode == s.halt.mode  # asked once more for what is over: no ladder begins again for it
        drill = s.halt.drill and e.drill  # one that met a hold or a halt under way is none any more
        halt = replace(s.halt, mode=e.mode, by=by, done=done, drill=drill)
    else:
        halt = HaltView(e.nonce, e.mode, e.by, e.drill, e.ts, total=len(s.pods), last_drill_s=s.halt.last_drill_s)
    what = "drill" if e.drill else e.mode.upper()
    text = f"{what} asked by {e.by}" + (f": {e.reason}" if e.reason else "")
    return logged(changed(s, halt=halt), e, "info" if e.drill else "warn", "halt", text)


_HALT_ORDER = ("unknown", "sent", "seen", "held", "released", "halted", "gone")


def _halt_ack(s: Snapshot, e: ev.HaltAck) -> Snapshot:
    if e.nonce != s.halt.nonce:
        return s
    if e.gpu:
        s = changed(s, halt=replace(s.halt, gpus=put(s.halt.gpus, e.pod, e.gpu)))
        level = "info" if e.gpu == "empty" else "error"
        return s if e.gpu == "none" else logged(s, e, level, e.pod, f"{ack_words(e.stage, -1)}; {e.detail}")
    old = s.halt.acks.get(e.pod)
    rank = {name: i for i, name in enumerate(_HALT_ORDER)}
    if old and e.stage != "unknown" and rank.get(e.stage, 0) < rank.get(old[0], 0):
        return s  # evidence never goes back, but a pod that falls silent afterwards is unknown
    step = e.step if e.step >= 0 or not old else old[1]
    ack = (e.stage, step, e.checkpoint or (old[2] if old else ""), e.ts)
    s = changed(s, halt=replace(s.halt, acks=put(s.halt.acks, e.pod, ack)))
    words = ack_words(e.stage, e.step, e.checkpoint)
    return logged(s, e, "error" if e.stage == "unknown" else "info", e.pod, words, e.detail)


def _halt_done(s: Snapshot, e: ev.HaltDone) -> Snapshot:
    if e.nonce != s.halt.nonce:
        return s
    passed = e.drill and e.verified == e.total > 0  # another proves nothing of how long a halt takes
    drill_s = e.seconds if passed else s.halt.last_drill_s
    mode, what = (s.halt.mode, "drill") if e.drill else (e.mode, e.mode.upper())  # a hold that met a halt halts with it
    halt = replace(
        s.halt,
        mode=mode,
        done=True,
        verified=e.verified,
        total=e.total,
        step=e.step,
        seconds=e.seconds,
        last_drill_s=drill_s,
    )
    s = changed(s, halt=halt)
    if e.mode == "halt":
        where = halt_words(e.verified, e.total, -1)
        s = changed(s, status="halted", detail=f"at step {e.step}" if e.total and e.step >= 0 else where)
    unknown = f", {e.total - e.verified} not" if e.verified < e.total else ""
    told = f"{what} {halt_words(e.verified, e.total, e.step, unknown)}, {e.seconds:.1f} s"
    return logged(s, e, "info" if e.verified == e.total else "error", "halt", told)


def _cost(s: Snapshot, e: ev.CostTick) -> Snapshot:
    shift = e.at - e.ts if e.at > 0 else s.clock_shift
    told = {"hourly": e.hourly, "spent": e.spent, "forecast": e.forecast, "runway_h": e.runway_h}
    return changed(s, **told, clock_shift=shift)


def _verdict(s: Snapshot, e: ev.PhaseVerdict) -> Snapshot:
    view = VerdictView(
        e.ok,
        e.global_root,
        e.sid_job,
        e.detail,
        e.bundle,
        e.ts,
        MappingProxyType(dict(e.values)),
        tuple(e.result_hashes),
        e.run_root,
        e.level,
        e.pinned,
        MappingProxyType(dict(e.files)),
    )
    values = "".join(f", {k}={v:.4f}" for k, v in e.values.items())
    text = f"{e.phase} VERIFIED, global root {e.global_root[:12]}{values}"
    text = text if e.ok else f"{e.phase} NOT VERIFIED: {e.detail}"
    return logged(changed(s, verdicts=put(s.verdicts, e.phase, view)), e, "info" if e.ok else "error", "verify", text)


def _alert(s: Snapshot, e: ev.Alert) -> Snapshot:
    text = e.text + (f" ({e.hint})" if e.hint else "")
    entry = LogEntry(e.ts, e.level, e.subject or e.name, text, alert=e.name)
    return changed(s, alerts=(*s.alerts[-99:], entry), log=(*s.log[-(LOG_KEEP - 1) :], entry))


def _intent(s: Snapshot, e: ev.Intent) -> Snapshot:
    return logged(s, e, "info", e.by, f"asked for {e.action}")


def _action_done(s: Snapshot, e: ev.ActionDone) -> Snapshot:
    text = f"{e.action} {'done' if e.ok else 'not done'}" + (f": {e.detail}" if e.detail else "")
    return logged(s, e, "info" if e.ok else "error", e.pod or "run", text)


def _flight(s: Snapshot, e: ev.FlightRead) -> Snapshot:
    s = changed(s, flight=FlightView(e.ts, e.folder, dict(e.newest), tuple(e.silent), tuple(e.findings)))
    silent = f"; no answer from {', '.join(e.silent)}" if e.silent else ""
    text = "; ".join(e.findings) or "nothing differs"
    return logged(s, e, "warn" if e.findings or e.silent else "info", "flight", f"flight recorder: {text}{silent}")


def _triage(s: Snapshot, e: ev.TriageTried) -> Snapshot:
    s = changed(s, triage=(*s.triage, TriageView(e.rung, e.step, e.ts)))
    return logged(s, e, "warn", "triage", f"goes on from step {e.step} with {e.rung}, asked by {e.by}")


def settings_after(changed: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The changes of settings in force after ``more``, whose None takes an earlier one back."""
    return {path: value for path, value in {**changed, **more}.items() if value is not None}


def _settings(s: Snapshot, e: ev.SettingsChanged) -> Snapshot:
    s = changed(s, changed_settings=MappingProxyType(settings_after(s.changed_settings, e.changes)))
    words = ", ".join(f"{k} as planned" if v is None else f"{k} = {value_words(v)}" for k, v in e.changes.items())
    return logged(s, e, "warn", "rollout", f"from the next attempt on {words}, asked by {e.by}")


def _home(s: Snapshot, e: ev.CheckpointHome) -> Snapshot:
    if e.engine_run == s.engine_run:
        s = changed(s, home=put(s.home, e.pod, (e.step, e.sha256)))
    return logged(s, e, "info", e.pod, f"checkpoint of step {e.step} is home, {e.sha256[:12]}")


def _consent(s: Snapshot, e: ev.Consent) -> Snapshot:
    s = changed(s, consents=tuple(dict.fromkeys((*s.consents, (e.what, e.by)))))
    return logged(s, e, "info", e.by, f"signed for {e.what}")


def _vouched(s: Snapshot, e: ev.PodVouched) -> Snapshot:
    return logged(s, e, "info", f"P{e.party}", f"its domain vouches for {e.pod}", e.identity)


def _domain(s: Snapshot, e: ev.DomainReported) -> Snapshot:
    old = s.domains.get(e.party)
    view = DomainView(e.party, e.stage, e.status, e.step, e.steps, e.detail, e.ts)
    s = changed(s, domains=put(s.domains, e.party, view))
    if old is not None and (old.stage, old.status, old.detail) == (e.stage, e.status, e.detail):
        return s
    level = {"failed": "error", "halt": "error", "silent": "error", "waiting": "warn"}.get(e.status, "info")
    return logged(s, e, level, f"P{e.party}", f"its domain says: {view.words()}")


def _foretold(s: Snapshot, e: ev.PlanForetold) -> Snapshot:
    view = ForetoldView(**{f.name: getattr(e, f.name) for f in fields(ForetoldView)})
    rounds = f"{e.rounds:.0f} rounds, " if e.rounds else ""
    text = f"the plan foretells {rounds}{e.bytes / 1e6:.2f} MB and {e.seconds:.2f} s a step of the full run"
    text += f", {e.low:.2f} to {e.high:.2f} s by what else these processors do" if e.high else ""
    return logged(changed(s, foretold=view), e, "info", "plan", text)


def _forecast(s: Snapshot, e: ev.Forecast) -> Snapshot:
    view = ForecastView(**{f.name: getattr(e, f.name) for f in fields(ev.Forecast) if f.name != "ts"})
    took = f"{e.seconds:.0f} s (error {e.seconds_error:.0f} s), ${e.cost:.2f}"
    text = f"the full run's {counted(e.steps, 'step')} will take {took}"
    return logged(changed(s, prediction=view), e, "info", "forecast", text)


def _scored(s: Snapshot, e: ev.ForecastScored) -> Snapshot:
    if s.prediction is None:
        return s
    view = replace(s.prediction, scored=True, took_s=e.seconds, cost_was=e.cost, bytes_were=e.bytes, sigmas=e.sigmas)
    view = replace(view, bytes_sigmas=e.bytes_sigmas)
    text = f"took {e.seconds:.0f} s, {s.prediction.seconds:.0f} s were forecast: off by {e.sigmas:.1f} of its error"
    return logged(changed(s, prediction=view), e, "info", "forecast", text)


def _followed(s: Snapshot, e: ev.Followed) -> Snapshot:
    how = f"no halt: {e.no_halt}" if e.no_halt else "it has the run contract: F9 holds and halts it"
    s = changed(s, followed=e.target, no_halt=e.no_halt)
    return logged(s, e, "info", e.pod, f"{e.target} is followed; {how}")


def _ended(s: Snapshot, e: ev.RunEnded) -> Snapshot:
    s = changed(s, status=e.status, detail=e.detail, leaks=tuple(e.leaks), ended=e.ts)
    return logged(s, e, "info" if e.status == "ok" else "warn", "rollout", f"run ended: {e.status} {e.detail}".rstrip())


def _malformed(s: Snapshot, e: ev.LinesMalformed) -> Snapshot:
    """Count. A sample is told; of the journal's own rows, which come again with every reading, one a kind."""
    where = e.where if e.where in s.malformed or len(s.malformed) < MALFORMED_KEEP else "others"
    s = changed(s, malformed=put(s.malformed, where, s.malformed.get(where, 0) + max(1, e.count)))
    if not e.sample or (e.where, e.src) in s.odd:
        return s
    if e.journalled:
        s = changed(s, odd=(*s.odd, (e.where, e.src))[-MALFORMED_KEEP:])
    return logged(s, e, "warn", e.where, f"malformed line ({'journal, ' if e.journalled else ''}{e.src}): {e.sample}")


_REDUCERS: dict[type[ev.Event], Callable[[Snapshot, Any], Snapshot]] = {
    **reported_state.REDUCERS,
    ev.RunCreated: _created,
    ev.StageChanged: _stage,
    ev.GateMeasured: _gate,
    ev.PodChanged: _pod,
    ev.LinkChanged: _link,
    ev.PhaseStarted: _phase,
    ev.ForkDetected: _fork,
    ev.HaltRequested: _halt_requested,
    ev.HaltAck: _halt_ack,
    ev.HaltDone: _halt_done,
    ev.CostTick: _cost,
    ev.PhaseVerdict: _verdict,
    ev.Alert: _alert,
    ev.Intent: _intent,
    ev.ActionDone: _action_done,
    ev.TriageTried: _triage,
    ev.SettingsChanged: _settings,
    ev.FlightRead: _flight,
    ev.Consent: _consent,
    ev.DomainReported: _domain,
    ev.PodVouched: _vouched,
    ev.CheckpointHome: _home,
    ev.PlanForetold: _foretold,
    ev.Forecast: _forecast,
    ev.ForecastScored: _scored,
    ev.Followed: _followed,
    ev.RunEnded: _ended,
    ev.LinesMalformed: _malformed,
}


def reduce(s: Snapshot, e: ev.Event, seq: int | None = None) -> Snapshot:
    """Fold one event into the snapshot. One that cannot be folded is counted, told once a kind, and left out."""
    before, reducer = s, _REDUCERS.get(type(e))
    if reducer is not None:
        try:
            s = reducer(s, e)
        except bad_records.ERRORS as error:
            if bad_records.strict() and not isinstance(error, bad_records.BadRecordError):
                raise
            s = _malformed(s, _unusable(e, error))
    stamp = {"updated": max(s.updated, e.ts), "seq": seq if seq is not None else s.seq + 1}
    if s is before:
        return changed(s, **stamp)
    s.__dict__.update(stamp)  # the reducer has just made it, and nobody else has seen it
    return s


def _unusable(e: ev.Event, error: Exception) -> ev.LinesMalformed:
    pod = getattr(e, "pod", "")
    where = pod if isinstance(pod, str) and pod else "journal"
    why = str(error) if isinstance(error, bad_records.BadRecordError) else f"{type(error).__name__}: {error}"
    return ev.LinesMalformed(ts=e.ts, where=where, src=e.kind, sample=clean(why, 200), journalled=True)


def fold(events: Iterable[ev.Event], start: Snapshot | None = None) -> Snapshot:
    """The state after all of these events, in order."""
    s = start or Snapshot()
    for e in events:
        s = reduce(s, e)
    return s
