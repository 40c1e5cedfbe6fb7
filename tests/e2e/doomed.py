"""The command line with a gateway that is killed at one moment of a change. Run as a script: ``doomed.py MOMENT serve ...``.

``KIND half``: while the entry KIND is written into the journal of changes. ``KIND written``: when it is on the disk, before the
kernel is told. ``KIND told``: once the kernel was told.
"""

from __future__ import annotations

import os
import signal
import sys

from loraledger.cli.main import main
from loraledger.events import Event, RolloutEnded, RolloutSet
from loraledger.gateway.serve import Gateway
from loraledger.operate import journal
from loraledger.operate.change import Change


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kind_of(event: Event) -> str | None:
    """The entry that ``event`` follows."""
    if isinstance(event, RolloutSet):
        return "accept" if event.members is None else "roll_out"
    return "roll_back" if isinstance(event, RolloutEnded) else None


class Doomed(Gateway):
    """Dies before or after it tells the kernel of one kind of entry."""

    kind = moment = ""

    def feed(self, event: Event) -> None:
        if self.moment == "written" and kind_of(event) == self.kind:
            die()
        super().feed(event)
        if self.moment == "told" and kind_of(event) == self.kind:
            die()


class Torn(journal.ChangeJournal):
    """Dies in the middle of one kind of entry."""

    kind = ""

    def append(
        self,
        at_ns: int,
        kind: journal._Kind,
        who: str,
        why: str,
        change: Change,
        evidence: dict[str, object] | None = None,
    ) -> journal.Entry:
        if kind == self.kind:
            said = {"at_ns": at_ns, "kind": kind, "who": who, "why": why, "change": change}
            line = journal._encode(journal.Entry(n=len(self.entries) + 1, **said))  # type: ignore[arg-type]
            with (self.directory / journal.FILE).open("ab") as file:
                file.write(line[: len(line) // 2])
            die()
        return super().append(at_ns, kind, who, why, change, evidence)


def doom(kind: str, moment: str) -> None:
    """Have this process die then."""
    from loraledger.gateway import changes, serve

    if moment == "half":
        Torn.kind = kind
        vars(changes)["ChangeJournal"] = Torn
    else:
        Doomed.kind, Doomed.moment = kind, moment
        vars(serve)["Gateway"] = Doomed


if __name__ == "__main__":
    doom(*sys.argv.pop(1).split())
    main()
