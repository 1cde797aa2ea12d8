"""From a bare host to an answering agent: wheel, Python, agent. Idempotent, and each step is reported."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from uvcc_console.core.log import logger
from uvcc_console.fleet import pod, wheel_cache
from uvcc_console.fleet.agent_client import ROOT, AgentClient
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.fleet.wheel import Wheel, engine_requirements
from uvcc_console.fleet.wheel_cache import WheelSet
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError
from uvcc_engine.contract.machine import torch_floor
from uvcc_engine.contract.parsing.untrusted import as_int, as_object, json_of
from uvcc_engine.contract.run_files.files import DOMAIN_KEY

log = logger(__name__)

# what the engine imports on a pod; torch first, since it must come from the image
NEEDED = (
    "torch",
    "numpy",
    "cryptography",
    "safetensors",
    "asyncssh",
    "starlette",
    "uvicorn",
    "httptools",
    "httpx",
    "yaml",
    "rfc8785",
    "google_crc32c",
    "blake3",
)
INSTALL_S = 900.0
# what jobs download stays on the pod's own disk between smoke and full run; an image or a profile may know better
CACHES = " ".join(
    f'{name}="${{{name}:-$HOME/{ROOT}/cache/{folder}}}"'
    for name, folder in (("HF_HOME", "hf"), ("TIKTOKEN_CACHE_DIR", "tiktoken"))
)
LOG = f"{ROOT}/bootstrap.log"
ANSWER_S = 90.0
SCRIPT_S = 300.0  # many pods of one machine look at their Pythons at once
Progress = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Bootstrapped:
    """What runs on the pod now. ``versions`` of Python and the needed packages; ``agent`` its answer to hello."""

    python: str
    code_hash: str
    boot_id: str
    home: str
    versions: dict[str, str] = field(default_factory=dict)
    agent: dict[str, Any] = field(default_factory=dict)


async def _python_on(
    link: PodLink, python: str, script: str, *args: str, give_way: int = 0, timeout: float = SCRIPT_S
) -> dict[str, Any]:
    """Run one of the pod scripts with a Python of the pod; it prints one JSON object."""
    nice = ["nice", "-n", str(give_way)] if give_way else []
    command = " ".join([*nice, shlex.quote(python), "-", *(shlex.quote(a) for a in args)])
    text = await link.sh(command, timeout=timeout, stdin=pod.source(script))
    try:
        found = json_of(text.splitlines()[-1])
    except (ValueError, IndexError):
        raise UvccError(f"pod {link.name}: {script} answered {text[:80]!r}", "see the pod by hand") from None
    assert isinstance(found, dict)
    return found


async def _choose_python(
    link: PodLink, packages: Sequence[str], say: Progress, give_way: int, wheels: WheelSet
) -> dict[str, Any]:
    """The image's Python if it has all that is needed, else a venv on top of it. Raises UvccError with the reason."""
    surveys = []
    for python in await usable_pythons(link):
        survey = await _python_on(link, python, "survey.py", *NEEDED, "--", *packages, give_way=give_way)
        _hold_to_the_floor(survey)
        if not survey["missing"]:
            return survey
        if f"/{ROOT}/venv/" not in survey["python"]:
            surveys.append(survey)
    best = min(surveys, key=lambda s: ("torch" in s["missing"], len(s["missing"])))
    say("python", f"installing {', '.join(best['missing'])}")
    lacks_torch = "torch" in best["missing"] and not torch_floor.brings_torch(packages)
    own = [_torch_for(link, best, wheels)] if lacks_torch else []
    venv = f"{ROOT}/venv/bin/python"
    wanted = [*engine_requirements(), *packages, *own]
    if wheels:
        await wheel_cache.send(link, wheels, say)
    install = wheels.pip(venv)
    # compiled loops for what computes on a CPU; where they cannot be had (a Python too new, say) torch does the same
    more = shlex.join([*wanted, *engine_requirements("kernels")])
    loops = "" if best.get("gpu") else f"{install} {more} >>{LOG} 2>&1 || :\n"
    script = (
        # pip of the image is enough, so that an image without ensurepip will do; the .pth makes the image's packages
        # visible even where the image's Python is itself a venv
        f"{shlex.quote(best['python'])} -m venv --without-pip --system-site-packages {ROOT}/venv\n"
        f"for s in {ROOT}/venv/lib/python*/site-packages; do echo {shlex.quote(best['site'])} >$s/image.pth; done\n"
        f"{venv} -m pip --version >/dev/null 2>&1 || {venv} -m ensurepip >/dev/null || exit 1\n"
        f"{install} {shlex.join(wanted)} >>{LOG} 2>&1 || {{ tail -n 3 {LOG} >&2; exit 1; }}\n{loops}"
    )
    try:
        await link.sh(script, timeout=INSTALL_S)
    except UvccError as e:
        if isinstance(e, UnreachableError) or not wheels:
            raise
        raise UvccError(e.what, "is it in the folder of fleet.wheels, for the image's Python and system?") from e
    survey = await _python_on(link, venv, "survey.py", *NEEDED, "--", *packages)
    _hold_to_the_floor(survey)
    if survey["missing"]:
        least = torch_floor.text_of(torch_floor.LEAST)
        raise UvccError(
            f"pod {link.name} still lacks {', '.join(survey['missing'])}",
            f"choose an image that has PyTorch {least} or newer",
        )
    return survey


def _hold_to_the_floor(survey: dict[str, Any]) -> None:
    """A torch that the engine cannot run on counts as missing: another is installed over the image's."""
    if torch_floor.is_old(str(survey["versions"].get("torch", ""))) and "torch" not in survey["missing"]:
        survey["missing"].append("torch")


def _torch_for(link: PodLink, survey: dict[str, Any], wheels: WheelSet) -> str:
    """The wheel that fits the pod's driver, or the one that was sent. Raises UvccError naming the pod."""
    if wheels.has("torch"):
        return "torch"
    try:
        return torch_floor.wheel_for(str(survey.get("driver", "")))
    except ConfigError as error:
        raise UvccError(f"pod {link.name}: {error.what}", error.hint) from error


async def usable_pythons(link: PodLink) -> list[str]:
    """Every usable Python of the pod, best first. Raises UvccError if there is none."""
    found = (await link.sh(pod.PYTHONS)).splitlines()
    if not found:
        raise UvccError(f"pod {link.name} has no Python 3.11 or newer", "choose another image")
    return found


async def bootstrap(
    link: PodLink,
    wheel: Wheel,
    on_progress: Progress | None = None,
    *,
    identity_seed: str = "",
    domain: str = "",
    packages: Sequence[str] = (),
    preload: str = "",
    give_way: int = 0,
    life_s: float = 0.0,
    wheels: WheelSet = WheelSet(),
) -> Bootstrapped:
    """Bring one pod up to an agent that answers, running exactly this wheel; safe to repeat.

    ``identity_seed`` (demo only) makes the party's identity reproducible. ``domain``: the key of the domain that the
    pod obeys; it signs no policy that this key has not approved. ``preload`` names the modules that workers share
    ("none" for commands that are no Python of ours; empty for the agent's default). ``give_way``: the niceness of what
    is heavy here, where many pods share one machine. ``life_s``: after so long the pod ends by itself what was started
    on it, whoever is still there to ask for it; 0 where it does so anyhow. ``wheels``: what is missing is
    installed from these, and no package index is asked.

    Raises UvccError or UnreachableError naming the step that failed; what was done stays and is found again.
    """

    def say(step: str, detail: str = "") -> None:
        log.info("bootstrap: %s %s", step, detail, pod=link.name)
        if on_progress is not None:
            on_progress(step, detail)

    say("connect", link.address)
    await link.connect_until(ANSWER_S)
    say("wheel", wheel.sha256[:12])
    await _install_wheel(link, wheel, say, give_way)
    say("python")
    survey = await _choose_python(link, packages, say, give_way, wheels)
    if domain:
        await link.put(f"{domain}\n".encode(), f"{ROOT}/{DOMAIN_KEY}")
    say("agent", f"python {survey['versions']['python']}, torch {survey['versions'].get('torch', '?')}")
    await _start_agent(link, wheel, survey["python"], identity_seed, preload, give_way)
    if life_s > 0:
        await _start_keeper(link, survey["python"], life_s)
    hello = await _ask_agent(link, wheel)
    say("ready", wheel.sha256[:12])
    return Bootstrapped(
        survey["python"], wheel.sha256, survey["boot_id"], survey["home"], dict(survey["versions"]), hello
    )


async def _install_wheel(link: PodLink, wheel: Wheel, say: Progress, give_way: int) -> None:
    """Upload unless this very wheel lies there; verify its hash on the pod; unpack to its own folder."""
    remote = f"{ROOT}/wheel/{wheel.path.name}"
    folders = f"mkdir -p {ROOT}/wheel {ROOT}/runs {ROOT}/relay"
    done = await link.sh(f"umask 077; {folders}; cat {ROOT}/{wheel.site_name}/CODE_HASH 2>/dev/null || :")
    if done == wheel.sha256:
        return
    say("upload", f"{wheel.path.stat().st_size >> 10} KiB")
    await link.put(wheel.path, remote)
    python = (await usable_pythons(link))[0]
    say("unpack", wheel.site_name)
    folder = f"{ROOT}/{wheel.site_name}"
    await _python_on(link, python, "unpack.py", remote, wheel.sha256, folder, give_way=give_way)


async def _start_agent(
    link: PodLink, wheel: Wheel, python: str, identity_seed: str, preload: str, give_way: int
) -> None:
    """Write the bridge's launcher and start the agent detached; the agent itself finds one that runs already."""
    path = f'export PYTHONPATH="$HOME/{ROOT}/{wheel.site_name}" PYTHONUNBUFFERED=1'
    # whatever is started here can be found by this mark, also on a host that is no pod of ours alone
    mark = f'export UVCC_ROOT="$HOME/{ROOT}"'
    head = f'umask 077\ncd "$HOME" || exit 1\n{path}\n{mark}\nexport {CACHES}\n'
    run = f"exec {shlex.quote(python)}"
    # the bridge needs the standard library only; -S spares it the site packages
    bridge = f'#!/bin/sh\n{head}{run} -S -m uvcc_engine.agent.attach --root "$HOME/{ROOT}"\n'
    await link.put(bridge.encode(), f"{ROOT}/attach")
    seed = f"export UVCC_IDENTITY_SEED={shlex.quote(identity_seed)}\n" if identity_seed else ""
    options = "--detach" + (f" --preload {shlex.quote(preload)}" if preload else "")
    options += f" --give-way {give_way}" if give_way else ""
    start = f'{head}{seed}{run} -m uvcc_engine.agent --root "$HOME/{ROOT}" {options} </dev/null\n'
    done = await link.run("exec /bin/sh -s", stdin=start.encode(), timeout=ANSWER_S)  # a seed is nobody's argument
    if done.exit is None:
        raise UnreachableError(f"pod {link.name}: the agent's start was cut off ({done.trouble})", "try again")
    if done.exit != 0:
        what = done.trouble.removeprefix("error: ")
        raise UvccError(f"the agent of pod {link.name} does not start: {what}", f"see {ROOT}/agent.log there")


async def _start_keeper(link: PodLink, python: str, life_s: float) -> None:
    """Leave somebody behind who needs neither console nor agent; one of an earlier bootstrap makes way."""
    await link.put(pod.source("keeper.py"), f"{ROOT}/keeper.py")
    mark = f'export UVCC_ROOT="$HOME/{ROOT}"'
    said = await link.sh(f'{mark}\n{shlex.quote(python)} -S {ROOT}/keeper.py "$UVCC_ROOT" {life_s:.0f} </dev/null')
    found = as_object(said.rpartition("\n")[2])
    if found is None or not as_int(found.get("keeper"), 1):
        raise UvccError(f"pod {link.name}: nobody stays to end it in time", f"see {ROOT}/keeper.log there")


async def _ask_agent(link: PodLink, wheel: Wheel) -> dict[str, Any]:
    """The agent's answer to hello; it must run this wheel and no other. Raises UvccError with the end of its log."""
    client = AgentClient(link, holder="bootstrap")
    try:
        hello = await client.start(patience_s=ANSWER_S)
    except UnreachableError as e:
        tail = await link.run(f"tail -n 3 {ROOT}/agent.log")
        raise UvccError(f"{e.what}; its log ends: {tail.text or 'empty'}", "fix the image or the packages") from e
    finally:
        await client.close()
    found = str(hello.get("code_hash", ""))
    if found != wheel.sha256:
        raise UvccError(f"the agent of pod {link.name} runs other code ({found[:12]})", "halt its run, then try again")
    return hello


async def bootstrap_all(
    links: Sequence[PodLink], wheel: Wheel, on_progress: Callable[[str, str, str], None] | None = None, **options: Any
) -> list[Bootstrapped]:
    """Bootstrap many pods at once; ``on_progress(pod, step, detail)``. The first failure cancels the others."""

    def reporter(name: str) -> Progress:
        return lambda step, detail: on_progress(name, step, detail) if on_progress is not None else None

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(bootstrap(link, wheel, reporter(link.name), **options)) for link in links]
    return [task.result() for task in tasks]
