"""``fleet.wheels``: what pods install comes from a folder of the operator's, over SSH, once, and nothing else does."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import zipfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import asyncssh
import pytest

from uvcc_console.fleet import wheel_cache
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.fleet.wheel import build_wheel
from uvcc_console.fleet.wheel_cache import WheelSet, read_wheels
from uvcc_console.plan.profile import parse
from uvcc_engine.contract.errors import ConfigError, UvccError


def package(folder: Path, name: str) -> Path:
    sources = folder / "sources" / name
    sources.mkdir(parents=True)
    (sources / "__init__.py").write_text('__version__ = "1.2.3"\n')
    return build_wheel(folder / "wheels", sources).path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package(tmp_path, "uvcc_sample")
    package(tmp_path, "uvcc_other")
    return tmp_path / "wheels"


def of(wheels: WheelSet) -> list[str]:
    return [wheel.path.name.partition("-")[0] for wheel in wheels.wheels]


# ---- the operator's folder


def test_the_folder_is_read_whole_and_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = read_wheels(str(folder))
    assert of(wheels) == ["uvcc_other", "uvcc_sample"]
    assert wheels.has("uvcc-sample")
    assert not wheels.has("torch")
    with monkeypatch.context() as m:
        m.setattr(zipfile.ZipFile, "testzip", lambda _: pytest.fail("read again"))
        assert read_wheels(str(folder)) == wheels
    first = wheels.wheels[0].path
    with zipfile.ZipFile(first, "a") as archive:
        archive.writestr("more.py", "pass\n")
    assert read_wheels(str(folder)).folder != wheels.folder  # another set lies elsewhere on a pod
    assert not read_wheels("")


def test_a_folder_that_will_not_do_is_told_before_anything_is_rented(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        read_wheels(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"has no \.whl file"):
        read_wheels(str(tmp_path))
    (tmp_path / "torch-2.9-py3-none-any.whl").write_bytes(b"half a downl")
    with pytest.raises(ConfigError, match="is damaged"):
        read_wheels(str(tmp_path))
    (tmp_path / "torch-2.9-py3-none-any.whl").rename(tmp_path / "a b;rm.whl")
    with pytest.raises(ConfigError, match="no name of a wheel"):
        read_wheels(str(tmp_path))


@pytest.mark.parametrize("injury", ["half", "a bit in the middle", "empty"])
def test_a_wheel_that_is_not_whole_is_damaged(folder: Path, injury: str) -> None:
    path = next(folder.glob("uvcc_other*"))
    data = bytearray(path.read_bytes())
    if injury == "a bit in the middle":
        data[data.index(b"1.2.3")] ^= 1
    path.write_bytes({"half": data[: len(data) // 2], "empty": b""}.get(injury, data))
    with pytest.raises(ConfigError, match=r"uvcc_other.* is damaged"):
        read_wheels(str(folder))


def test_a_folder_that_others_write_to_or_that_says_otherwise_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="anyone on this machine may write"):
        read_wheels(str(folder))
    folder.chmod(0o755)
    one, other = sorted(folder.glob("*.whl"))
    one.chmod(0o646)
    with pytest.raises(ConfigError, match="anyone on this machine may write"):
        read_wheels(str(folder))
    one.chmod(0o644)
    sums = folder / "SHA256SUMS"
    said = subprocess.run(["sha256sum", one.name, other.name], cwd=folder, capture_output=True, text=True, check=True)
    sums.write_text(said.stdout)
    assert len(read_wheels(str(folder)).wheels) == 2
    with zipfile.ZipFile(one, "a") as archive:
        archive.writestr("evil.py", "pass\n")
    with pytest.raises(ConfigError, match=f"{one.name} is not the wheel that SHA256SUMS names"):
        read_wheels(str(folder))
    sums.write_text("".join(line for line in said.stdout.splitlines(keepends=True) if one.name not in line))
    with pytest.raises(ConfigError, match=f"{one.name} is not among those that SHA256SUMS names"):
        read_wheels(str(folder))
    sums.write_text("not sums\n")
    with pytest.raises(ConfigError, match="not what sha256sum writes"):
        read_wheels(str(folder))


def test_the_folder_holds_for_the_whole_fleet() -> None:
    job = {"kind": "private", "model": "mlp-digits", "steps": 2}
    parties = {f"P{p}": {"provider": "local"} for p in range(3)}
    parties["P1"]["wheels"] = "/somewhere"
    with pytest.raises(ConfigError, match="wheels holds for the whole fleet"):
        parse({"job": job, "fleet": {"parties": parties}})


# ---- a pod, with a shell of its own


class Sftp(asyncssh.SFTPServer):
    """Files below the pod's home; ``full`` after so many bytes, ``lossy`` swallows what comes then."""

    home = ""
    full = 0
    lossy = False

    def __init__(self, chan: asyncssh.SSHServerChannel) -> None:
        super().__init__(chan, chroot=self.home)

    def write(self, file_obj: object, offset: int, data: bytes) -> int:
        if self.full and offset + len(data) > self.full:
            if not self.lossy:
                raise OSError(errno.ENOSPC, "No space left on device")
            return len(data)
        return super().write(file_obj, offset, data)  # type: ignore[arg-type]


@pytest.fixture
def pod(ssh_fake: Callable, client_key: asyncssh.SSHKey, tmp_path: Path) -> Callable:  # type: ignore[type-arg]
    home = tmp_path / "home"

    async def shell(process: asyncssh.SSHServerProcess) -> None:  # type: ignore[type-arg]
        told = await process.stdin.read() if (process.command or "").endswith("-s") else b""
        done = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", process.command or ""), cwd=home, stdin=-1, stdout=-1, stderr=-1
        )
        out, err = await done.communicate(told)
        process.stdout.write(out)
        process.stderr.write(err)
        process.exit(done.returncode or 0)

    @asynccontextmanager
    async def made(full: int = 0, lossy: bool = False) -> AsyncIterator[tuple[PodLink, Path]]:
        home.mkdir(exist_ok=True)
        kind = type("_", (Sftp,), {"home": str(home), "full": full, "lossy": lossy})
        fake = await ssh_fake(shell, sftp=kind)
        link = PodLink("p0r0", fake.address, client_key)
        try:
            yield link, home
        finally:
            await link.close()

    return made


class Said(list[str]):
    def __call__(self, step: str, detail: str) -> None:
        self.append(detail)


async def test_each_goes_once_and_what_else_lay_there_is_not_installed(pod: Callable, folder: Path) -> None:  # type: ignore[type-arg]
    wheels, said = read_wheels(str(folder)), Said()
    async with pod() as (link, home):
        await wheel_cache.send(link, wheels, said)
        there = home / wheels.folder
        assert {p.name: p.read_bytes() for p in there.iterdir()} == {p.name: p.read_bytes() for p in folder.iterdir()}
        await wheel_cache.send(link, wheels, said)
        assert said == ["2 wheels, 0 MiB"]
        one = wheels.wheels[0].path
        (there / one.name).write_bytes(one.read_bytes()[:100])  # half of it, from a console that was killed
        await wheel_cache.send(link, wheels, said)
        assert said[1:] == ["1 wheels, 0 MiB"]
        (there / "uvcc_sample-9.9.9-py3-none-any.whl").write_bytes(
            one.read_bytes()
        )  # a newer one, which pip would take
        await wheel_cache.send(link, wheels, said)
        assert {p.name for p in there.iterdir()} == set(wheels.hashes)


async def test_two_consoles_send_the_same_at_once(pod: Callable, folder: Path) -> None:  # type: ignore[type-arg]
    wheels, said = read_wheels(str(folder)), Said()
    async with pod() as (link, home), pod() as (other, _):
        await asyncio.gather(*(wheel_cache.send(one, wheels, said) for one in (link, other, link, other)))
        assert {p.name: p.read_bytes() for p in (home / wheels.folder).iterdir()} == {
            p.name: p.read_bytes() for p in folder.iterdir()
        }


async def test_a_full_disk_is_told_and_leaves_no_wheel_behind(pod: Callable, folder: Path) -> None:  # type: ignore[type-arg]
    wheels = read_wheels(str(folder))
    async with pod(full=200) as (link, home):
        with pytest.raises(UvccError, match=r"p0r0.*[Nn]o space"):
            await wheel_cache.send(link, wheels, Said())
        assert not list((home / wheels.folder).glob("*.whl"))
    async with pod(full=200, lossy=True) as (link, home):
        with pytest.raises(UvccError, match="arrived damaged") as refused:
            await wheel_cache.send(link, wheels, Said())
        assert "full" in refused.value.hint
    async with pod() as (link, _):  # there is room again
        await wheel_cache.send(link, wheels, Said())
