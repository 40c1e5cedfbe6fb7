"""The fleet that docs/operate.md walks through: its files, and traffic for it.

    python -m benchmarks.operate_example FOLDER            # settings as the page shows them, sixteen small adapters, a profile
    python -m benchmarks.operate_example FOLDER --traffic  # two users of each tenant ask the gateway, until Ctrl-C

The profile is the one that comes with the program (an 8B model on one H100), under the name and version that an emulator tells. A
user asks for an adapter, the first ones more often (Zipf 0.6), waits for the answer, and for up to half a second more.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
from contextlib import suppress
from pathlib import Path

import httpx2
import msgspec
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # small files of true form are made there

from e2e.fleet import write_adapters
from loraledger.replay.scenarios.profiles import DEFAULT, read_profile
from loraledger.twin.calibrated import encode

PAGE = Path(__file__).parents[1] / "docs/operate.md"
NAMES = tuple(f"a{number}" for number in range(16))
USERS, PAUSE_S, TOKENS = 2, 0.5, 16


def settings() -> str:
    """As the page has them."""
    (found,) = re.findall(r"<!-- a change -->.*?```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


def write_example(folder: Path) -> None:
    """Files that the page's commands read, in ``folder``, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "loraledger.yaml").write_text(settings(), encoding="utf-8")
    write_adapters(folder / "adapters", NAMES)
    shipped = read_profile(DEFAULT)
    told = msgspec.structs.replace(shipped, name="engine", engine_version="0.32.0+emulator", model="base")
    (folder / "engine.json").write_bytes(encode(told))


async def traffic(folder: Path) -> None:
    """All users at once."""
    said = yaml.safe_load((folder / "loraledger.yaml").read_bytes())
    url = f"http://127.0.0.1:{said['listen']['port']}"
    tenants = [tenant["name"] for tenant in said["tenants"]]
    async with httpx2.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as http, asyncio.TaskGroup() as group:
        for number, tenant in enumerate(tenants * USERS):
            group.create_task(user(http, tenant, random.Random(number)))


async def user(http: httpx2.AsyncClient, tenant: str, chance: random.Random) -> None:
    """Asks for ever."""
    weights = [1 / rank**0.6 for rank in range(1, len(NAMES) + 1)]
    while True:
        (name,) = chance.choices(NAMES, weights)
        body = {"model": name, "prompt": "Hello", "max_tokens": TOKENS, "stream": True}
        with suppress(httpx2.TransportError):  # the gateway is started again
            await http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer key-{tenant}"})
        await asyncio.sleep(chance.uniform(0, PAUSE_S))


def main() -> None:
    """Into the folder that is named, unless it is there; with ``--traffic`` it has to be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--traffic", action="store_true", help="ask the gateway of the example, until Ctrl-C")
    given = parser.parse_args()
    if given.traffic:
        with suppress(KeyboardInterrupt):
            asyncio.run(traffic(given.folder))
        return
    if given.folder.exists():
        parser.error(f"{given.folder} is there already: name a new folder")
    write_example(given.folder)
    print(f"{given.folder}: {', '.join(sorted(path.name for path in given.folder.iterdir()))}")


if __name__ == "__main__":
    main()
