"""Whole rollouts over real OpenSSH servers: each ends ok, or with a named reason and a next command that works."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest
import yaml
from folder_trainer import FOLDERS_TRAINER
from opensshd import Sshd, why_not

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
from demorun import Uvcc

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it runs"),
]
PROFILE = {
    "job": {
        "kind": "private",
        "model": "mlp-digits",
        "steps": 12,
        "batch": 64,
        "lr": 0.5,
        "seed": 7,
        "reveal": ["loss"],
    },
    "topology": {"replicas": 1, "stages": 1, "tensor": 1, "microbatches": 1},
    "link": "auto",
    "smoke": {"replicas": 1, "steps": 2},
    "gates": {"loss_falls": False, "result_hashes": 1, "verifier": "ok", "halt_drill_s": 60},
    "limits": {"hourly": 0, "total": 0, "ttl": "20m", "wait": "2m"},
    "halt": {"lease": "60s", "auto": ["hold", "halt", "term"]},
}


class Site:
    """Three hosts, an inventory, a profile and a user's environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o755)
        for name in ("temp", "home"):
            (folder / name).mkdir()
        self.uvcc = Uvcc(folder / "home", folder / "temp")
        self.mine = asyncssh.generate_private_key("ssh-ed25519")
        self.key = folder / "mine"
        self.key.write_bytes(self.mine.export_private_key("openssh"))
        self.key.chmod(0o600)
        self.servers: list[Sshd] = []
        self.entries: list[dict[str, Any]] = []

    def add(self, *more: str, **entry: Any) -> Sshd:
        n = len(self.servers)
        server = Sshd(self.folder / f"s{n}", self.mine, *more, home=self.folder / f"h{n}").up()
        self.servers.append(server)
        self.entries.append(server.entry(self.key, party=n, domain=f"d{n}", **entry))
        return server

    def profile(self, **changes: Any) -> str:
        hosts, path = self.folder / "hosts.yaml", self.folder / "ssh-hosts.yaml"
        hosts.write_text(yaml.safe_dump({"hosts": self.entries}))
        path.write_text(yaml.safe_dump({**PROFILE, "fleet": {"provider": "inventory", "hosts": str(hosts)}, **changes}))
        return str(path)

    def roll(self, **changes: Any) -> subprocess.CompletedProcess[str]:
        return self.uvcc.run("rollout", self.profile(**changes), "--headless", "--yes", "--json")

    def traces(self) -> list[str]:
        """What is left of us on any host: files, a claim, a key."""
        found = [p for s in self.servers if s.home for p in (s.home / ".uvcc", s.home / ".uvcc-claim")]
        keys = [s.authorized for s in self.servers if "uvcc-operator" in s.authorized.read_text()]
        return [str(p) for p in found if os.path.lexists(p)] + [str(p) for p in keys]

    def do(self, command: str) -> subprocess.CompletedProcess[str]:
        return self.uvcc.run(*shlex.split(command)[1:])


@pytest.fixture
def site() -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="uk", dir="/tmp"))
    made = Site(folder)
    yield made
    for server in made.servers:
        server.freeze(signal.SIGCONT) if server.process else None
        server.down()
    for pid in made.uvcc.processes():
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def _ok(site: Site, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert (said["status"], said["verified"], said["leaks"]) == ("ok", True, [])
    assert site.traces() == []
    assert site.do("uvcc pods").returncode == 0


def test_few_sessions_and_a_crowded_door(site: Site) -> None:
    for _ in range(3):
        site.add("MaxSessions 2", "MaxStartups 2:50:4")
    _ok(site, site.roll())


def test_a_folder_goes_to_a_host_of_ones_own_and_its_artifacts_come_home(site: Site) -> None:
    """``job.code`` on an inventory: uploaded without what git ignores, set up there, drilled, and nothing stays."""
    site.add()
    code = site.folder / "trainer"
    (code / "lib").mkdir(parents=True)
    (code / "train.py").write_text(FOLDERS_TRAINER)
    (code / "lib" / "helper.py").write_text("import time\nWORD = 'hello'\ndef work(): time.sleep(0.02)\n")
    for name, text in ((".gitignore", "*.bin\n"), ("data.bin", "x" * 1000), (".env", "SECRET=1\n")):
        (code / name).write_text(text)
    site_packages = "$(python -c 'import sysconfig; print(sysconfig.get_paths()[\"purelib\"])')"
    job = {
        "kind": "command",
        "argv": ["python", "train.py"],
        "steps": 120,
        "code": str(code),
        "setup": f'cp lib/helper.py "{site_packages}"',
        "artifacts": ["out/**"],
    }
    smoke = {"steps": 100}
    done = site.roll(job=job, topology={}, smoke=smoke, gates={"loss_falls": True, "halt_drill_s": 60}, link="auto")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert (said["status"], said["leaks"]) == ("ok", [])
    (run_dir,) = (site.folder / "home" / "runs").iterdir()
    artifacts = run_dir / "artifacts"
    for phase, steps in (("smoke", 100), ("full", 120)):
        assert (artifacts / phase / "p0r0" / "files" / "out" / "model.txt").read_text() == f"hello {steps}"
    record = json.loads((artifacts / "code.json").read_text())
    assert [f["path"] for f in record["files"]] == [".gitignore", "lib/helper.py", "train.py"]
    assert any(name.startswith(".env") for name in record["left_out"])
    assert site.traces() == []


def _python_for_all(folder: Path) -> Path:
    """A folder with a Python that other users may run, too, and that finds the packages of this one."""
    system = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    ask = [system or "false", "-c", "import sys; print(sys.version_info[:2])"]
    said = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    if said != str(tuple(sys.version_info[:2])):
        pytest.skip("the system's python3 is another than the one of the tests, which other users may not run")
    subprocess.run([str(system), "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "these.pth").write_text("".join(f"{p}\n" for p in sys.path if p.endswith("site-packages")))
    return folder / "bin"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make users")
def test_three_users_of_one_machine(site: Site) -> None:
    """One server with MaxSessions 2 and MaxStartups 2:50:4, three users: each is a host of its own."""
    names = [f"uvcct{os.getpid() % 100000}{x}" for x in "abc"]
    server = Sshd(
        site.folder / "s0", site.mine, "MaxSessions 2", "MaxStartups 2:50:4", "AuthorizedKeysFile .ssh/authorized_keys"
    )
    server.more.append(f"SetEnv PATH={_python_for_all(site.folder / 'python')}:/usr/bin:/bin OMP_NUM_THREADS=1")
    homes = [site.folder / f"u{n}" for n in range(3)]
    try:
        for n, (name, home) in enumerate(zip(names, homes, strict=True)):
            subprocess.run(["useradd", "-M", "-d", str(home), "-s", "/bin/bash", "-p", "*", name], check=True)
            (home / ".ssh").mkdir(parents=True)
            (home / ".ssh/authorized_keys").write_bytes(site.mine.export_public_key())
            for path in (home, home / ".ssh", home / ".ssh/authorized_keys"):
                shutil.chown(path, name, pwd.getpwnam(name).pw_gid)
            site.entries.append({**server.entry(site.key, party=n, domain=f"d{n}"), "user": name})
        server.up()
        site.servers.append(server)
        server.authorized = homes[0] / ".ssh/authorized_keys"
        _ok(site, site.roll())
        assert [sorted(p.name for p in home.iterdir() if p.name.startswith(".uvcc")) for home in homes] == [[], [], []]
    finally:
        for name in names:
            subprocess.run(["userdel", "-f", name], check=False, capture_output=True)


def test_a_forced_command(site: Site) -> None:
    site.add(), site.add(), site.add("ForceCommand echo no shell here")
    done = site.roll()
    assert done.returncode == 1
    assert "the account runs a forced command" in json.loads(done.stdout)["detail"]
    assert json.loads(done.stdout)["leaks"] == []
    assert site.traces() == []
    site.servers[2].down()
    site.servers[2].more = []
    site.servers[2].up()
    _ok(site, site.roll())


def test_a_password_only_server(site: Site) -> None:
    site.add(), site.add(), site.add("PubkeyAuthentication no", "PasswordAuthentication yes")
    done = site.roll()
    assert done.returncode == 1
    assert "lets in by password only, not by a key" in json.loads(done.stdout)["detail"]
    assert json.loads(done.stdout)["leaks"] == []
    assert site.traces() == []


def _under_way(site: Site) -> tuple[str, Any]:
    """A long run that trains."""
    job = {**PROFILE["job"], "steps": 100000}  # type: ignore[dict-item]
    process = site.uvcc.start("rollout", site.profile(job=job), "--headless", "--yes", "--json")
    runs = site.folder / "home/runs"
    while not (found := list(runs.glob("*/journal.sqlite"))):
        assert process.poll() is None, process.communicate()
        os.sched_yield()
    run = found[0].parent.name
    site.uvcc.events(run, lambda e: e["kind"] == "stage" and e["name"] == "full" and e["status"] == "running")
    site.uvcc.events(run, lambda e: e["kind"] == "metric" and e["step"] >= 2)
    return run, process


def test_a_host_that_shows_another_key_at_the_end(site: Site) -> None:
    """While it trains, another machine takes a host's place: nobody talks to it, the others are ended."""
    for _ in range(3):
        site.add()
    run, process = _under_way(site)
    server = site.servers[1]
    server.down()
    server.new_host_key()
    server.up()
    done = site.do(f"uvcc teardown {run}")
    process.communicate(timeout=500)
    assert done.returncode == 1
    name = f"uvcc-{run}-p1r0"
    command = next(line for line in done.stderr.splitlines() if name in line and "end it with: " in line)
    command = command.partition("end it with: ")[2]
    assert command == f"uvcc pods --end {name} --host-key {server.fingerprint}"
    assert all("/h1/" in path for path in site.traces())
    assert site.traces()
    assert site.do("uvcc pods").returncode == 3
    assert site.do(command).returncode == 0
    assert site.traces() == []
    assert site.do(f"uvcc teardown {run}").returncode == 0


def test_a_server_that_freezes(site: Site) -> None:
    """The frozen host is told as unknown; the run is torn down without it, and it is ended once it goes on."""
    for _ in range(3):
        site.add()
    run, process = _under_way(site)
    site.servers[1].freeze()
    done = site.do(f"uvcc teardown {run}")
    process.communicate(timeout=500)
    assert done.returncode == 1
    name = f"uvcc-{run}-p1r0"
    command = next(line for line in done.stderr.splitlines() if name in line and "end it with: " in line)
    assert "gave no answer in time" in command
    assert site.do("uvcc pods").returncode == 3
    site.servers[1].freeze(signal.SIGCONT)
    assert site.do(command.partition("end it with: ")[2]).returncode == 0
    assert site.traces() == []
    assert site.do("uvcc pods --sweep").returncode == 0
