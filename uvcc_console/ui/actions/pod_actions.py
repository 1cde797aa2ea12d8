"""What can be done to the pod under the cursor: intents for the conductor, and what the console does by itself."""

from __future__ import annotations

from textual.app import SuspendNotSupported

from uvcc_console.core.answers import triage
from uvcc_console.core.snapshot import PodView
from uvcc_console.ui.panels.fleet import FleetPanel, key_of
from uvcc_console.ui.run_base import RunConsole
from uvcc_engine.contract.errors import UvccError

ASKED = {
    "restart": "This kills its workers; the run goes on from the last common checkpoint.",
    "replace": "This deletes the pod and creates another in its place.",
}
MANY = {
    "restart": "This kills the workers of all of them; the run goes on from the last common checkpoint.",
    "replace": "This deletes all of them and creates others in their place, one after the other.",
}


class PodActions:
    """Part of ``Commands``: needs ``app``, ``_intend`` and ``_later``."""

    app: RunConsole

    def _intend(self, action: str, **args: str) -> None:
        raise NotImplementedError

    def open(self, number: str, pod: str = "", *, filtered: str | None = None) -> None:
        raise NotImplementedError

    def _pod_under_cursor(self) -> PodView | None:
        if here := self.app.main.trail.here.pod:
            return self.app.snap.pods.get(here)
        fleet = self.app.main.query_one(FleetPanel)
        name = fleet.state.cursor
        if name not in map(key_of, fleet.rows_in_order()):  # a filter hides it: nobody means what is not shown
            return None
        worker = self.app.snap.workers.get(name)
        return self.app.snap.pods.get(worker.pod if worker else name)

    def _pod(self, word: str) -> PodView | None:
        """The pod that was named, or the one under the cursor; says so if there is none."""
        pod = self.app.snap.pods.get(word) if word else self._pod_under_cursor()
        if pod is None:
            self.app.say(f"no pod {word}" if word else "put the cursor of the fleet on a pod (panel 1)", "warning")
        return pod

    def _pods(self, word: str) -> list[PodView]:
        """The pods that are named or marked, else the one under the cursor; says so if there is none."""
        if word or self.app.main.trail.here.pod:
            named = [self._pod(name) for name in word.replace(",", " ").split()] if word else [self._pod("")]
            return [pod for pod in named if pod is not None]
        marked = self.app.main.query_one(FleetPanel).marked_pods()
        found = [pod for name in marked if (pod := self.app.snap.pods.get(name)) is not None]
        one = None if found else self._pod("")
        return found or ([one] if one is not None else [])

    def do_shell(self, _: str) -> None:
        """Leave the screen for a shell on the pod under the cursor; the run and its halt sidecar go on."""
        import subprocess

        from uvcc_console.ui.actions.shell import ssh_command

        pod = self._pod("")
        if pod is None:
            return
        try:
            with ssh_command(pod, self.app.run_dir, self.app.snap.profile) as command, self.app.suspend():
                print(f"{pod.pod}: exit comes back to the console. To halt meanwhile: uvcc halt {self.app.snap.run}")
                subprocess.run(command, check=False)
        except (UvccError, OSError, SuspendNotSupported) as e:
            self.app.say(f"no shell: {e}", "error")

    def do_stackdump(self, word: str) -> None:
        """Stacks of the pod's workers; they arrive in the log."""
        for pod in self._pods(word):
            self._intend("stackdump", pod=pod.pod)

    def do_flight(self, _: str) -> None:
        """All workers' flight recorders, shown in the panel of the collectives."""
        self._intend("flight")
        self.open("4")

    def do_fetch(self, word: str) -> None:
        """Fetch the evidence of the pod under the cursor now."""
        for pod in self._pods(word):
            self._intend("fetch", pod=pod.pod)

    def do_restart(self, word: str) -> None:
        """End the pod's workers, after asking."""
        self._ask("restart", word)

    def do_replace(self, word: str) -> None:
        """Another pod in its place, after asking."""
        self._ask("replace", word)

    def _ask(self, action: str, word: str) -> None:
        from uvcc_console.ui.screens.confirm import ConfirmScreen

        pods = self._pods(word)
        if not pods:
            return
        names = [pod.pod for pod in pods]
        lines = [f"{p.pod}  {p.provider}  {p.state}  ${p.price_hr:.2f}/h" for p in pods]
        lines.append(ASKED[action] if len(pods) == 1 else MANY[action])
        title, typed = (names[0], names[0]) if len(pods) == 1 else (f"{len(pods)} pods", f"{action} {len(pods)} pods")

        def answered(yes: bool | None) -> None:
            for name in names if yes else ():
                self._intend(action, pod=name)

        self.app.push_screen(ConfirmScreen(f"{action.capitalize()} {title}", lines, typed), answered)

    def do_nccl(self, _: str) -> None:
        """One window of NCCL's own log."""
        self._change(triage.BY_WORD["loud"], "nccl_debug")

    def do_triage(self, _: str) -> None:
        """The next single change, with what was tried before."""
        rung = triage.propose(self.app.snap)
        if rung is not None:
            self._change(rung, "triage")

    def _change(self, rung: triage.Rung, action: str) -> None:
        from uvcc_console.ui.screens.confirm import ConfirmScreen

        s = self.app.snap
        lines = [f"Next change: {rung.change}: {rung.why}.", *(f"  {k}={v}" for k, v in rung.env.items())]
        lines += [f"The run halts at a checkpoint (step {s.step} now) and goes on from it with this change alone."]
        lines += ["", "Tried before:", *(f"  {line}" for line in triage.story(s))] if s.triage else []

        def answered(yes: bool | None) -> None:
            if yes:
                self._intend(action, rung=rung.word)

        self.app.push_screen(ConfirmScreen("Triage", lines, rung.word), answered)

    def do_tensorboard(self, word: str) -> None:
        """Start the forwarder beside the console and show the address it says."""
        pod = self._pod(word)
        if pod is not None:
            self.app.forward_tensorboard(pod.pod)
