"""The store among processes and threads: kills, limits of the process, another user, admissions at once."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from adapters.store.test_store import WEIGHTS, admit, hidden, tenant
from loraledger.adapters.store.store import Store, Stored
from loraledger.errors import ConfigError, InputFileError

PRELUDE = """
import os, resource, sys
from pathlib import Path
from loraledger.adapters.store.store import Store
from loraledger.errors import InputFileError
root, folder = Path(sys.argv[1]), Path(sys.argv[2])
store = Store.open(root, None)
def admit():
    return store.admit(folder / "adapter_config.json", folder / "adapter_model.safetensors")
"""


def python(body: str, root: Path, folder: Path) -> subprocess.Popen[str]:
    code = PRELUDE + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", code, root, folder], stdout=subprocess.PIPE, text=True)


def test_a_kill_in_the_middle_of_an_admission_leaves_nothing_after_opening(tmp_path: Path) -> None:
    root, folder = tmp_path / "store", tenant(tmp_path / "a")
    with Store.open(root, None) as store:
        whole = admit(store, tenant(tmp_path / "b", b"b"))
    os.truncate(folder / WEIGHTS, 4 * 1024**3)  # holes: seconds of copying, stopped at once
    process = python("admit()", root, folder)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size > 1024**2 for path in root.glob(f".incoming-*/{WEIGHTS}")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    with pytest.raises(ConfigError, match=f"in use by the process with pid {process.pid}"):
        Store.open(root, None)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list(root.glob(".incoming-*"))
    with Store.open(root, None) as store:
        assert hidden(store) == set()
        assert (list(store.entries), store.foreign) == ([whole.digest], {})
        assert store.bytes == whole.bytes


def test_a_kill_in_the_middle_of_a_collection_leaves_no_half_entry(tmp_path: Path) -> None:
    root, folder = tmp_path / "store", tenant(tmp_path / "a")
    body = """
    import shutil
    admit()
    shutil.rmtree = lambda path: (os.unlink(path / "adapter_config.json"), os.kill(os.getpid(), 9))
    store.collect()
    """
    process = python(body, root, folder)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list(root.glob(".dropping-*"))
    with Store.open(root, None) as store:
        assert (hidden(store), dict(store.entries), store.foreign) == (set(), {}, {})
        assert admit(store, folder).new


def test_a_limit_on_the_size_of_files_is_a_full_store(tmp_path: Path) -> None:
    folder = tenant(tmp_path / "a", b"w" * 3_000_000)
    body = """
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, resource.RLIM_INFINITY))
    try:
        admit()
    except InputFileError as error:
        print(error.code, error.message, sorted(os.listdir(root)))
    """
    out, _ = python(body, tmp_path / "store", folder).communicate()
    assert out.startswith("store_full the store")
    assert "(File too large)" in out
    assert out.endswith("['.lock']\n")


DROP = """
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
"""


def test_a_user_without_privileges_admits_and_collects() -> None:
    # Modes bind everybody but root: renaming and deleting must work on what was made read-only.
    body = """
    stored = admit()
    try:
        (stored.path / "x").touch()
    except PermissionError:
        print("closed")
    print(store.verify(stored.digest), store.collect() == (stored.digest,), sorted(os.listdir(root)))
    """
    # Rights are dropped after the imports: the interpreter may lie where only root can read.
    code = PRELUDE.replace("root, folder =", f"{DROP}root, folder =") + textwrap.dedent(body)
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        top = Path(name)
        top.chmod(0o755)
        (top / "store").mkdir()
        if os.geteuid() == 0:
            os.chown(top / "store", 65534, 65534)
        command: list[str | Path] = [sys.executable, "-c", code, top / "store", tenant(top / "a")]
        done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("closed\nTrue True ['.lock']\n", "")


def test_threads_that_admit_the_same_content_get_the_same_entry(tmp_path: Path) -> None:
    folders = [tenant(tmp_path / str(number), b"w" * 2_000_000) for number in range(4)]
    results: list[Stored] = []
    with Store.open(tmp_path / "store", None) as store:
        gate = threading.Barrier(8)

        def work(number: int) -> None:
            gate.wait()
            results.append(admit(store, folders[number % 4], f"holder {number}"))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({result.digest for result in results}) == 1
        assert sorted(result.new for result in results) == [False] * 7 + [True]
        assert len(store.holders(results[0].digest)) == 8
        assert store.bytes == results[0].bytes
        assert hidden(store) == set()


def test_an_entry_that_is_held_from_its_admission_survives_collections_at_once(tmp_path: Path) -> None:
    folders = [tenant(tmp_path / str(number), str(number).encode()) for number in range(60)]
    with Store.open(tmp_path / "store", None) as store:
        done = threading.Event()

        def collector() -> None:
            while not done.is_set():
                store.collect()

        thread = threading.Thread(target=collector)
        thread.start()
        try:
            kept = [admit(store, folder, "r0") for folder in folders]
            for folder in folders:
                admit(store, folder)
        finally:
            done.set()
            thread.join()
        assert all((stored.path / WEIGHTS).is_file() and stored.digest in store.entries for stored in kept)
        assert store.bytes == sum(stored.bytes for stored in kept)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()  # else files that other tests dropped close meanwhile
    before = descriptors()
    folder = tenant(tmp_path / "a")
    with Store.open(tmp_path / "store", 150) as store:
        admit(store, folder, "r0")
        with pytest.raises(ConfigError):
            Store.open(tmp_path / "store", None)
        with pytest.raises(InputFileError, match="has no room"):
            admit(store, tenant(tmp_path / "b", b"b" * 100))
        with pytest.raises(InputFileError, match="not a regular file"):
            store.admit(folder / WEIGHTS, tmp_path)
    assert descriptors() <= before
