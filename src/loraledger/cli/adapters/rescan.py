"""``loraledger adapters rescan``: have the running gateway take in what the adapters' folders hold now."""

from __future__ import annotations

import sys

from loraledger.cli.ask import ask_gateway
from loraledger.cli.options import ConfigOption, JsonOption
from loraledger.cli.output import print_json
from loraledger.errors import ObjectiveError

PATIENCE_S = 3600.0
"""A thousand new adapters of 84 MB are read and copied in minutes."""


def rescan(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Serve new and changed adapters, stop serving those whose folder is gone. Exit code 5: some could not be taken in.

    One that became unreadable keeps its last good version. Tenants and other settings are not read again.
    """
    found = ask_gateway("POST", "rescan", config, PATIENCE_S)
    if as_json:
        print_json("rescan", found)
    else:
        for what in ("added", "changed", "removed"):
            print(f"{what}: {', '.join(found[what]) or 'none'}")
        for what in ("warnings", "problems"):
            for line in found[what]:
                print(f"{what.removesuffix('s')}: {line}", file=sys.stderr)
    if found["problems"]:
        raise ObjectiveError(f"{len(found['problems'])} adapters could not be taken in")
