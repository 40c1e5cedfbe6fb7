"""The examples that pages walk through."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def example_of(text: str, where: Path) -> Path:
    """The folder that the first command of ``text`` makes, below ``where``: a reader is in the clone when it is run."""
    ((module, folder),) = re.findall(r"```sh\npython -m (\S+) (\S+)\ncd \2\n", text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", module, folder], cwd=where, env=environment, check=True)
    return where / str(folder)
