"""Where the peers come from: a virtual environment each from PyPI, or Debian packages that are unpacked and not installed.

All of it lies in ``.cache/peers`` and is made once; to begin anew, delete that folder. Versions of PyPI are pinned in ``catalog``;
those of Debian are what this machine's lists have (``apt-get update`` first where there are none), and are shown as they are.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.processes import ROOT

PEERS = ROOT / ".cache/peers"
LIMIT_S = 900.0
_DONE = ".installed"


class InstallError(Exception):
    """A peer cannot be had here; the text says why, in one line."""


def from_pypi(name: str, *requirements: str) -> Path:
    """The ``bin`` folder of an environment with ``requirements``. Raises InstallError."""
    home = PEERS / name
    if not _made(home, requirements):
        _run([sys.executable, "-m", "venv", str(home)])
        _run([str(home / "bin/pip"), "install", "--quiet", "--disable-pip-version-check", *requirements])
        _mark(home, requirements)
    return home / "bin"


def from_debian(package: str, program: str, *libraries: str) -> Path:
    """A program of a package, unpacked together with ``libraries``, as far as there are packages of that name. Raises InstallError.

    Which libraries are needed depends on the release; one that is missing is told by the program itself when it is started.
    """
    home, wanted = PEERS / package, (package, *libraries)
    if not _made(home, wanted):
        home.mkdir(parents=True)
        for one in wanted:
            try:
                _run(["apt-get", "download", "-qq", one], cwd=home)
            except InstallError:
                if one == package:
                    raise
        for archive in home.glob("*.deb"):
            _run(["dpkg", "-x", str(archive), str(home)])
        _mark(home, wanted)
    return home / program


def debian_version(package: str) -> str:
    """Of an unpacked package, without its epoch: part of the archive's name."""
    (archive,) = (PEERS / package).glob(f"{package}_*.deb")
    return archive.name.split("_")[1].rpartition("%3a")[2]


def libraries_of(package: str) -> dict[str, str]:
    """What its environment needs to find the libraries that were unpacked beside it."""
    return {"LD_LIBRARY_PATH": str(PEERS / package / f"usr/lib/{platform.machine()}-linux-gnu")}


def _run(words: list[str], cwd: Path | None = None) -> None:
    """Run a step; its last line of complaint is the reason."""
    try:
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except FileNotFoundError:
        raise InstallError(f"there is no {words[0]} here") from None
    except subprocess.TimeoutExpired:
        raise InstallError(f"{Path(words[0]).name} took over {LIMIT_S:.0f} s") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise InstallError(f"{Path(words[0]).name}: {said[-1].strip()}")


def _made(home: Path, requirements: tuple[str, ...]) -> bool:
    """Whether it is there; half of one, or one with other requirements, is removed."""
    mark = home / _DONE
    if mark.exists() and mark.read_text(encoding="utf-8") == "\n".join(requirements):
        return True
    shutil.rmtree(home, ignore_errors=True)
    return False


def _mark(home: Path, requirements: tuple[str, ...]) -> None:
    (home / _DONE).write_text("\n".join(requirements), encoding="utf-8")
