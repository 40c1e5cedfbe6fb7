"""Where the peers come from: a virtual environment each from PyPI, or a Debian package that is unpacked and not installed.

All of it lies in ``.cache/peers`` and is made once; to begin anew, delete that folder. Versions are pinned in ``catalog``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.processes import ROOT

PEERS = ROOT / ".cache/peers"
_DONE = ".installed"


def from_pypi(name: str, *requirements: str) -> Path:
    """The ``bin`` folder of an environment with ``requirements``. Raises CalledProcessError when pip fails."""
    home = PEERS / name
    if not _made(home, requirements):
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        pip = [str(home / "bin/pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *requirements], check=True)
        _mark(home, requirements)
    return home / "bin"


def from_debian(package: str, program: str) -> Path:
    """A program of a package, unpacked. Raises CalledProcessError when there is no such package here, or no apt."""
    home = PEERS / package
    if not _made(home, (package,)):
        home.mkdir(parents=True)
        subprocess.run(["apt-get", "download", "-qq", package], cwd=home, check=True)
        (archive,) = home.glob("*.deb")
        subprocess.run(["dpkg", "-x", str(archive), str(home)], check=True)
        archive.unlink()
        _mark(home, (package,))
    return home / program


def _made(home: Path, requirements: tuple[str, ...]) -> bool:
    """Whether it is there; half of one, or one with other requirements, is removed."""
    mark = home / _DONE
    if mark.exists() and mark.read_text(encoding="utf-8") == "\n".join(requirements):
        return True
    shutil.rmtree(home, ignore_errors=True)
    return False


def _mark(home: Path, requirements: tuple[str, ...]) -> None:
    (home / _DONE).write_text("\n".join(requirements), encoding="utf-8")
