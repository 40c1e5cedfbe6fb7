"""A wall clock that steps, for one process and its children, without touching the machine's.

A shim of a few lines is compiled with ``cc`` and preloaded: it adds what stands in a mapped file to CLOCK_REALTIME and leaves the
monotonic clocks alone, as a step of the system clock does. (libfaketime was tried: it fails absolute sleeps on the monotonic clock,
which are CPython's.) A time namespace does not do: it has no offset for CLOCK_REALTIME.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long long *step_ns;

__attribute__((constructor)) static void find(void) {
    const char *path = getenv("CLOCK_STEP_FILE");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *found = mmap(0, sizeof *step_ns, PROT_READ, MAP_SHARED, fd, 0);
    if (found != MAP_FAILED) step_ns = found;
    close(fd);
}

int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, at);
    if (!failed && step_ns && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
        long long ns = at->tv_sec * 1000000000LL + at->tv_nsec + *step_ns;
        at->tv_sec = ns / 1000000000LL;
        at->tv_nsec = ns % 1000000000LL;
    }
    return failed;
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


class SteppedClock:
    """The clock of processes that are started within ``worn``. ``missing``: why it cannot be had, None when it can."""

    def __init__(self, folder: Path) -> None:
        self.missing: str | None = None
        self._step = folder / "clock-step"
        self._shim = folder / "clock-step.so"
        self._step.write_bytes(bytes(8))
        compiler = shutil.which("cc")
        if compiler is None:
            self.missing = "there is no C compiler (cc)"
            return
        source = folder / "clock-step.c"
        source.write_text(SOURCE, encoding="ascii")
        words = [compiler, "-shared", "-fPIC", "-O1", "-o", str(self._shim), str(source), "-ldl"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            self.missing = (
                f"the shim does not compile: {done.stderr.splitlines()[0] if done.stderr else done.returncode}"
            )

    def step(self, seconds: float) -> None:
        """From now on it shows so much more, or less, than the machine's."""
        with self._step.open("r+b") as file:
            file.write(struct.pack("<q", round(seconds * 1e9)))

    @contextmanager
    def worn(self) -> Iterator[None]:
        """Processes that are started inside have this clock, if there is one."""
        if self.missing is not None:
            yield
            return
        ours = {"LD_PRELOAD": str(self._shim), "CLOCK_STEP_FILE": str(self._step)}
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
