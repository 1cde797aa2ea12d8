"""The one table of what an operator can do. Bindings, palette, help, commands and the manual's table come from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from textual.binding import Binding

from uvcc_console.core import pod_states
from uvcc_console.core.answers import triage
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.ui.judging.condition import Judgement, judge, only_copies, undecided
from uvcc_console.ui.judging.lamps import DEAD, Lamp
from uvcc_console.ui.registry.panels import panels


@dataclass(frozen=True, slots=True)
class Context:
    """What decides whether an action is possible now."""

    snap: Snapshot
    has_run: bool = True
    readonly: bool = False
    replay: bool = False
    conductor: Lamp = field(default_factory=Lamp)
    behind_s: float = 0.0
    page: str = ""
    filtered: bool = False
    moved: bool = False
    own_hold: bool = False

    @property
    def judgement(self) -> Judgement:
        """What is true of the run now."""
        return judge(self.snap, conductor=self.conductor, behind_s=self.behind_s)


SKIPPABLE = ("drill", "gate")
Reason = Callable[[Context], str]


@dataclass(frozen=True, slots=True)
class UiAction:
    """One thing to do.

    ``keys`` are textual key names, ``label`` is what the operator reads, ``command`` is its word on the ``:`` line and
    ``cli`` its twin without a screen. ``reason`` says why it is impossible now ("" when it is possible). A ``guarded``
    action is not run when its key came inside pasted text.
    """

    id: str
    keys: str
    label: str
    name: str
    description: str
    reason: Reason
    command: str = ""
    cli: str = ""
    group: str = "run"
    guarded: bool = False
    priority: bool = False
    footer: bool = False


def _always(c: Context) -> str:
    return ""


def _run(c: Context) -> str:
    return "" if c.has_run else "open a run first"


def _live(c: Context) -> str:
    if not c.has_run:
        return "open a run first"
    return "this is a recording" if c.replay else ""


def _writes(c: Context) -> str:
    return _live(c) or ("read-only: attach without --read-only" if c.readonly else "")


def _open(c: Context) -> str:
    if why := _writes(c):
        return why
    return f"the run has ended ({c.snap.status.replace('_', ' ')}); start a new one" if c.snap.ended else ""


def _resume(c: Context) -> str:
    return _open(c) or c.judgement.resume


def _retry(c: Context) -> str:
    if why := _open(c):
        return why
    return "" if undecided(c.snap) else "no stage has failed"


def _skip(c: Context) -> str:
    if why := _retry(c):
        return why
    stage = c.snap.stage
    name = stage.name if stage else ""
    return "" if name in SKIPPABLE else f"{name} cannot be skipped, only {' and '.join(SKIPPABLE)}"


def _teardown(c: Context) -> str:
    if why := _open(c):
        return why
    frozen = c.judgement.name == "frozen"
    return f"{c.judgement.resume}: uvcc teardown {c.snap.run} makes it give way" if frozen else ""


def _halt(c: Context) -> str:
    return _live(c)


def _release(c: Context) -> str:
    return _live(c) or (
        "read-only: only a hold asked for here is released here" if c.readonly and not c.own_hold else ""
    )


def _evidence(c: Context) -> str:
    return _run(c) or ("read-only: attach without --read-only" if c.readonly else "")


def _shell(c: Context) -> str:
    if why := _writes(c):
        return why
    return "" if any(p.address and p.state not in pod_states.OVER for p in c.snap.pods.values()) else "no pod lives"


def _pods(c: Context) -> str:
    """What goes through the conductor to a pod's agent."""
    if why := _open(c):
        return why
    if c.conductor.state == DEAD:
        return "nobody conducts this run: r takes it up"
    if not c.conductor.well:
        return c.judgement.resume
    agents = any(p.state == "agent" for p in c.snap.pods.values())
    return "" if agents else "no pod has an agent yet"


def _workers(c: Context) -> str:
    return _pods(c) or ("" if c.snap.engine_run else "no workers were started yet")


def _replace(c: Context) -> str:
    if why := _pods(c):
        return why
    if only_copies(c.snap):
        return "the pod holds the only checkpoints of this run, none is home yet: W restarts its workers"
    return ""


def _triage(c: Context) -> str:
    return _workers(c) or triage.impossible(c.snap)


def _nccl(c: Context) -> str:
    if why := _workers(c):
        return why
    return "" if c.snap.job_kind in triage.KINDS else f"a {c.snap.job_kind} run does not use NCCL between its pods"


def _tensorboard(c: Context) -> str:
    if why := _shell(c):
        return why
    return "" if c.snap.engine_run else "no workers were started yet"


def _back(c: Context) -> str:
    return _run(c) or ("" if c.page or c.filtered else "this is the overview, and nothing is filtered")


def _last(c: Context) -> str:
    return _run(c) or ("" if c.moved else "no other view was shown yet")


def _replay(c: Context) -> str:
    return "" if c.replay else "only in a replay"


# fmt: off
_ALL = (
    UiAction("halt", "f9", "F9", "HALT", "hold every pod now; halts after 3 s or at a second press", _halt,
             "halt", "uvcc halt RUN", priority=True),
    UiAction("release", "escape", "Esc", "release", "within 3 s: undo the hold, the run goes on", _release,
             "release", priority=True),
    UiAction("back", "escape", "Esc", "back", "one view back, or the filter away", _back, group="screen"),
    UiAction("last", "minus", "-", "last view", "to the view before this one, and back again", _last,
             "last", group="screen"),
    UiAction("resume", "r", "r", "resume", "go on from the last common checkpoint", _resume,
             "resume", "uvcc resume RUN", guarded=True, footer=True),
    UiAction("retry", "R", "R", "retry", "repeat the stage that failed from its beginning", _retry,
             "retry", "uvcc resume RUN --retry", guarded=True),
    UiAction("skip", "x", "x", "skip", "skip the failed drill or gate (asks for its name)", _skip,
             "skip", "uvcc resume RUN --skip", guarded=True),
    UiAction("teardown", "t", "t", "tear down", "delete every pod of the run (asks for the run's name)", _teardown,
             "teardown", "uvcc teardown RUN", guarded=True, footer=True),
    UiAction("detach", "q", "q", "detach", "leave the console; the run goes on", _always,
             "q", group="screen", guarded=True, footer=True),
    UiAction("help", "question_mark", "?", "help", "the focused panel first, then every key", _always,
             "help", "uvcc --help", "screen", footer=True),
    UiAction("docs", "", ":docs", "manual", "the manual at a topic, or at the newest alert; m in the help, too",
             _always, "docs", "uvcc docs", "screen"),
    UiAction("command", "colon", ":", "command", "type a command", _always, group="screen", footer=True),
    UiAction("filter", "slash", "/", "filter", "show only matching workers and log lines, and charts on their page",
             _run, "filter", group="screen", footer=True),
    UiAction("palette", "ctrl+p", "ctrl+p", "palette", "find any action by name", _always, "palette", group="screen"),
    UiAction("snapshot", "s", "s", "snapshot", "keep this screen as evidence: SVG, text and JSON with their hashes",
             _evidence, "snapshot", "uvcc status RUN --json", "screen", guarded=True, footer=True),
    UiAction("shell", "exclamation_mark", "!", "shell", "a shell on the pod under the fleet's cursor (over SSH)",
             _shell, "shell", group="screen", guarded=True),
    UiAction("triage", "T", "T", "triage", "the next single change of the triage ladder, from the last checkpoint",
             _triage, "triage", "uvcc pod RUN triage", "pods", guarded=True),
    UiAction("stackdump", "D", "D", "stack dump", "have the pod's workers write their stacks (SIGUSR1)", _workers,
             "stackdump", "uvcc pod RUN stackdump POD", "pods", guarded=True),
    UiAction("flight", "C", "C", "recorder", "flight recorders: what all collectives are at, who differs (panel 4)",
             _workers, "flight", "uvcc pod RUN flight", "pods", guarded=True),
    UiAction("nccl", "N", "N", "NCCL debug", "go on from the last checkpoint with NCCL's log for one window", _nccl,
             "nccl", "uvcc pod RUN nccl_debug", "pods", guarded=True),
    UiAction("fetch", "F", "F", "fetch", "bring the pod's evidence and logs home now", _workers,
             "fetch", "uvcc pod RUN fetch POD", "pods", guarded=True),
    UiAction("tensorboard", "B", "B", "TensorBoard", "forward the pod's TensorBoard and show the address", _tensorboard,
             "tensorboard", "uvcc tensorboard RUN", "pods", guarded=True),
    UiAction("restart", "W", "W", "restart", "end the pod's workers, go on from the last checkpoint", _workers,
             "restart", "uvcc pod RUN restart POD", "pods", guarded=True),
    UiAction("replace", "P", "P", "replace pod", "delete the pod, with proof, and create another in its place",
             _replace, "replace", "uvcc pod RUN replace POD", "pods", guarded=True),
    *(
        UiAction(f"panel_{p.id}", p.key, p.key, p.name, p.description, _run, p.id, p.cli, "panels")
        for p in panels()
        if p.key
    ),
    UiAction("jump", "J", "J", "jump", "a sign on every panel in sight: its key takes the keyboard there", _run,
             "jump", group="screen"),
    UiAction("layout", "", ":layout", "layout", "what is kept of how you look at runs; usual forgets it", _run,
             "layout", group="screen"),
    UiAction("pod", "", "Enter", "pod", "the page of one pod: Enter in Fleet, or :pod NAME", _run,
             "pod", "uvcc status RUN --json", "screen"),
    UiAction("overview", "0", "0", "overview", "all panels together", _run, "overview", "uvcc attach RUN", "panels"),
    UiAction("find", "", ":find", "find", "search the log; n and N go on", _run, "find", group="screen"),
    UiAction("compare", "", ":compare", "compare", "lay another run's curves over the charts; no name takes them away",
             _run, "compare", "uvcc compare RUN", "screen"),
    UiAction("view", "", ":view", "view", "read the newest stack dump or flight record, or the artifact named", _run,
             "view", "uvcc logs RUN", "screen"),
    UiAction("sort", "", ":sort", "sort", "the fleet by a column, worst or place; asc and desc say which way", _run,
             "sort", group="screen"),
    UiAction("columns", "", ":columns", "columns", "choose the fleet's columns; usual brings the usual ones back", _run,
             "columns", group="screen"),
    UiAction("theme", "", ":theme", "theme", "the theme that is named, light or dark; no name lists all", _always,
             "theme", group="screen"),
    UiAction("replay_toggle", "p", "p", "pause", "pause or go on", _replay, "pause", "uvcc replay RUN", "replay"),
    UiAction("replay_back", "left_square_bracket", "[", "back", "a twentieth of the recording back", _replay,
             "back", group="replay"),
    UiAction("replay_on", "right_square_bracket", "]", "on", "a twentieth of the recording on", _replay,
             "on", group="replay"),
    UiAction("replay_next", "right_curly_bracket", "}", "next mark", "to the next stage, halt or failure", _replay,
             "next", group="replay"),
    UiAction("replay_before", "left_curly_bracket", "{", "mark before", "to the stage, halt or failure before", _replay,
             "before", group="replay"),
    UiAction("goto", "", ":goto", "go to", "HH:MM:SS, 50%, +30, step N, event N, halt, failed, fork", _replay,
             "goto", group="replay"),
    UiAction("replay_slower", "less_than_sign", "<", "slower", "half the speed", _replay, "slower", group="replay"),
    UiAction("replay_faster", "greater_than_sign", ">", "faster", "twice the speed", _replay, "faster", group="replay"),
)
# fmt: on
ACTIONS: dict[str, UiAction] = {a.id: a for a in _ALL}
COMMANDS: dict[str, UiAction] = {a.command: a for a in ACTIONS.values() if a.command}


def bindings() -> list[Binding]:
    """Textual bindings of every action that has a key."""
    return [
        Binding(a.keys, f"do('{a.id}')", a.name, show=False, priority=a.priority, id=a.id)
        for a in ACTIONS.values()
        if a.keys
    ]


_PAIRS = (
    ("replay_back", "replay_on", "move"),
    ("replay_before", "replay_next", "marks"),
    ("replay_slower", "replay_faster", "speed"),
)


_FOLLOWED = {"teardown": "stop following"}  # nothing of somebody else's is torn down


def _paired(out: list[tuple[str, str, bool]]) -> list[tuple[str, str, bool]]:
    """A recording's keys with those that belong together as one, so that help and the way out have room, too."""
    mine = {(a.label, a.name): a.id for a in ACTIONS.values() if a.group == "replay"}
    first = {one: (f"{ACTIONS[one].label} {ACTIONS[two].label}", word) for one, two, word in _PAIRS}
    second = {two for _, two, _ in _PAIRS}
    found: list[tuple[str, str, bool]] = []
    for label, name, possible in out:
        action = mine.get((label, name), "")
        if action in first:
            found.append((*first[action], possible))
        elif action not in second and action != "goto":  # :goto is in the help and on the : line
            found.append((label, name, possible))
    speed = [entry for entry in found if entry[1] == "speed"]  # help and the way out matter more
    return [entry for entry in found if entry[1] != "speed"] + speed


def footer(context: Context) -> list[tuple[str, str, bool]]:
    """(key, name, possible now) of the footer's actions, in a replay its own first.

    Those that only sometimes make sense are else left out.
    """
    out: list[tuple[str, str, bool]] = []
    order = sorted(ACTIONS.values(), key=lambda a: context.replay and a.group != "replay")
    for a in order:
        possible = not a.reason(context)
        sometimes = a.id in ("retry", "skip", "back") or (a.group == "replay" and context.replay)
        past = context.replay and a.id in ("resume", "teardown")
        if (a.footer and not past) or (sometimes and possible):
            out.append((a.label, _FOLLOWED.get(a.id, a.name) if context.snap.followed else a.name, possible))
    if context.replay:
        out = _paired(out)
    out.insert(3 if len(out) > 3 else len(out), ("1-7", "panels", context.has_run))
    return out


def markdown_table(actions: Iterable[UiAction] = ()) -> str:
    """The table of keys for the manual."""
    rows = ["| key | does | command | without a screen |", "|---|---|---|---|"]
    for a in actions or ACTIONS.values():
        command = f"`:{a.command}`" if a.command else ""
        cli = f"`{a.cli}`" if a.cli else ""
        rows.append(f"| `{a.label}` | {a.name}: {a.description} | {command} | {cli} |")
    return "\n".join(rows)
