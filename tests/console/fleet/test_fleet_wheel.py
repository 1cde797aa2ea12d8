from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from uvcc_console.fleet.pod import unpack
from uvcc_console.fleet.wheel import build_wheel
from uvcc_engine.contract.errors import UnreadableError


def package(folder: Path, body: str = "X = 1\n") -> Path:
    root = folder / "uvcc_sample"
    (root / "sub" / "__pycache__").mkdir(parents=True)
    (root / "__init__.py").write_text(f'"""Sample."""\n\n__version__ = "1.2.3"\n{body}')
    (root / "sub" / "__init__.py").write_text("")
    (root / "sub" / "data.json").write_text("[1, 2]")
    (root / "sub" / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"\0")
    return root


def test_the_same_sources_give_the_same_bytes_wherever_they_lie(tmp_path: Path) -> None:
    a = build_wheel(tmp_path / "out-a", package(tmp_path / "a"))
    other = package(tmp_path / "b")
    for path in other.rglob("*"):
        path.touch()
    (other / "sub").chmod(0o700)
    b = build_wheel(tmp_path / "out-b", other)
    assert a.path.read_bytes() == b.path.read_bytes()
    assert a.sha256 == b.sha256
    assert a.site_name == f"site-{a.sha256[:12]}"


def test_another_byte_is_another_code_hash(tmp_path: Path) -> None:
    a = build_wheel(tmp_path / "out", package(tmp_path / "a"))
    b = build_wheel(tmp_path / "out", package(tmp_path / "b", "X = 2\n"))
    assert a.sha256 != b.sha256


def test_compiled_files_stay_out_and_data_goes_in(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path / "out", package(tmp_path / "a"))
    names = zipfile.ZipFile(wheel.path).namelist()
    assert "uvcc_sample/sub/data.json" in names
    assert not [n for n in names if n.endswith(".pyc")]
    assert wheel.path.name == "uvcc_sample-1.2.3-py3-none-any.whl"


def test_pip_accepts_it(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path / "out", package(tmp_path / "a"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        "--disable-pip-version-check",
    ]
    subprocess.run([*command, "--target", str(tmp_path / "site"), str(wheel.path)], check=True, timeout=500)
    told = [sys.executable, "-c", "import uvcc_sample; print(uvcc_sample.X)"]
    found = subprocess.run(told, cwd=tmp_path / "site", capture_output=True, text=True, check=True, timeout=500)
    assert found.stdout == "1\n"


def test_the_engine_itself_packs_with_its_requirements(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    archive = zipfile.ZipFile(wheel.path)
    assert archive.testzip() is None
    assert "uvcc_engine/contract/agent_protocol/wire.py" in archive.namelist()
    (metadata,) = [n for n in archive.namelist() if n.endswith("/METADATA")]
    text = archive.read(metadata).decode()
    assert "Provides-Extra: engine" in text
    assert "textual" not in text
    assert "cryptography" in text


def test_missing_sources_are_told(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="cannot read"):
        build_wheel(tmp_path, tmp_path / "nothing")


def test_unpacking_verifies_first_and_writes_the_code_hash_last(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path / "out", package(tmp_path / "a"))
    site = tmp_path / wheel.site_name
    unpack.main(str(wheel.path), wheel.sha256, str(site))
    assert (site / "CODE_HASH").read_text() == wheel.sha256
    assert (site / "uvcc_sample" / "__init__.py").exists()
    data = bytearray(wheel.path.read_bytes())
    data[100] ^= 1
    wheel.path.write_bytes(data)
    with pytest.raises(SystemExit, match="damaged"):
        unpack.main(str(wheel.path), wheel.sha256, str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()
