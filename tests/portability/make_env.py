"""``python make_env.py FOLDER``: a virtual environment over this one whose every process hides what only Linux has.

    .venv/bin/python tests/portability/make_env.py .venv-portable
    .venv-portable/bin/python -m pytest @tests/portability/tests.txt

A variable of the environment would not do: pods give none of the operator's to what they start.
"""

from __future__ import annotations

import site
import subprocess
import sys
import sysconfig
from pathlib import Path


def make(folder: Path) -> Path:
    """Make the environment; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", folder], check=True)
    python = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    target = Path(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    below = dict.fromkeys([sysconfig.get_paths()["purelib"], *site.getsitepackages()])
    # addsitedir also obeys what lies there: editable installations are such files
    lines = [str(Path(__file__).resolve().parent), "import hide_linux"]
    lines += [f"import site; site.addsitedir({path!r})" for path in below]
    (target / "portable.pth").write_text("\n".join(lines) + "\n")
    return python


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
