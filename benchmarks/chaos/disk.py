"""A small disk of its own for the record: it can be full, and it can be slow.

A file with ext4 in it, mounted through a loop device, which takes the right to mount. *Full*: one file takes all that is left.
*Slow*: beside the journal, two writers make 16 MiB durable again and again, so each of the journal's own syncs waits behind theirs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MIB = 2**20
SIZE_MIB = 160
_WRITER = """
import os, sys
path, parent = sys.argv[1], os.getppid()
while os.getppid() == parent:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for _ in range(16):
        os.write(fd, bytes(1 << 20))
        os.fsync(fd)
    os.close(fd)
"""


class Disk:
    """The file system mounted at ``mount``. ``missing``: why it cannot be had, None when it can."""

    def __init__(self, image: Path, mount: Path) -> None:
        self.missing: str | None = None
        self._image, self._mount = image, mount
        self._writers: list[subprocess.Popen[bytes]] = []
        mount.mkdir()
        with image.open("wb") as file:
            file.truncate(SIZE_MIB * MIB)
        for words in (
            ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)],
            ["mount", "-o", "loop", str(image), str(mount)],
        ):
            try:
                done = subprocess.run(words, capture_output=True, text=True, check=False)
            except FileNotFoundError as error:
                self.missing = f"{error.filename} is not installed"
                return
            if done.returncode != 0:
                said = done.stderr.strip() or f"exit code {done.returncode}"
                self.missing = f"{words[0]} fails: {said.splitlines()[-1]}"
                return

    def fill(self) -> None:
        """Nothing more fits."""
        with (self._mount / "filler").open("wb", buffering=0) as file:
            chunk = bytes(4 * MIB)
            while chunk:
                try:
                    file.write(chunk)
                except OSError:
                    chunk = chunk[: len(chunk) // 2]

    def free(self) -> None:
        """There is room again."""
        (self._mount / "filler").unlink()

    def slow(self) -> None:
        """Syncs wait from now on."""
        for number in range(2):
            words = [sys.executable, "-c", _WRITER, str(self._mount / f"slow-{number}")]
            self._writers.append(subprocess.Popen(words))

    def fast(self) -> None:
        """They do not any more. Raises OSError when they cannot have waited all the while."""
        ended = self._stop_writers()
        for file in self._mount.glob("slow-*"):
            file.unlink()
        if ended:
            raise OSError(f"{ended} of the writers that make the disk slow ended by themselves")

    def close(self) -> None:
        """Unmount it, and give its room back."""
        self._stop_writers()
        if self.missing is None:
            subprocess.run(["umount", "--lazy", str(self._mount)], check=True)
        self._image.unlink()

    def _stop_writers(self) -> int:
        """End them; how many had ended before."""
        ended = sum(writer.poll() is not None for writer in self._writers)
        for writer in self._writers:
            writer.kill()
            writer.wait()
        self._writers.clear()
        return ended
