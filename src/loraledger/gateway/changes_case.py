"""What the control plane takes and shows of a change, and what the desk keeps of it beside its journal."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from loraledger.config import Settings
from loraledger.gateway.changes_force import engine_flags
from loraledger.operate.change import Change, Check, Guardrail, Metric, Target, Value
from loraledger.operate.journal import Entry
from loraledger.operate.watch import Verdict
from loraledger.units import NS_PER_S

_HOUR: Final = 3600 * NS_PER_S
Json = dict[str, object]


class Proposal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a proposal. Without ``before``: what is in force."""

    who: str
    why: str
    variable: str
    after: Value
    target: Target
    before: Value | UnsetType = UNSET
    guardrails: tuple[Guardrail, ...] = ()
    window_ns: int = _HOUR
    block_ns: int = 30 * NS_PER_S
    share: float = 0.1
    salt: str | None = None
    """Draws the members; by default the change's id."""


class Runs(msgspec.Struct, frozen=True):
    """The digests of both records."""

    before: str | None
    after: str | None


class Figures(msgspec.Struct, frozen=True):
    """What both came to."""

    before: dict[Metric, float | None]
    after: dict[Metric, float | None]


class Profile(msgspec.Struct, frozen=True):
    """What they rest on."""

    name: str


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What ``loraledger change replay`` attaches, as far as anybody reads it later; what more there is stays in the journal."""

    trace: str
    requests: int
    runs: Runs
    figures: Figures
    guardrails: tuple[Check, ...]
    """The target is the first of them."""
    profile: Profile
    stale: bool
    ok: bool
    reasons: tuple[str, ...]
    """Why it is not ``ok``."""


class TakenBack(msgspec.Struct, frozen=True):
    """How a change ended that the disk has not taken yet. ``change``: as it is since then."""

    change: Change
    who: str
    why: str
    verdict: Verdict | None


class Case(msgspec.Struct):
    """One change, and what its entries in the journal said beside it."""

    change: Change
    members: tuple[str, ...] | None = None
    """Who gets it first, since it was rolled out."""
    starts: dict[str, int | None] = {}
    """Of every replica, the start of its engine's process when the wait for engines began."""
    waiting_since: int = 0
    verdict: object = None
    """What it ended on."""
    note: str | None = None
    """What became of it since it was accepted."""
    against: str | None = None
    """What speaks against it, by its newest replay."""
    back: TakenBack | None = None
    """It was taken back, and the journal does not have that yet."""

    def fold(self, entry: Entry) -> None:
        """Take in one entry of the journal, as JSON has it."""
        self.change = entry.change
        self.back = None
        match entry.kind:
            case "replay":
                self.against = _against(entry.evidence)
            case "await" | "roll_out":
                said = msgspec.convert(entry.evidence, _Begun)
                self.members = said.members
                if entry.kind == "await":
                    self.starts, self.waiting_since = said.process_starts, entry.at_ns
            case "accept" | "roll_back":
                note = entry.evidence.get("settled")
                self.note = note if isinstance(note, str) else None
                self.verdict = entry.evidence.get("verdict", self.verdict)
            case _:
                pass


class _Begun(msgspec.Struct):
    members: tuple[str, ...]
    process_starts: dict[str, int | None] = {}


def _against(evidence: Json) -> str | None:
    """A journal of an older version may have evidence of any shape."""
    if evidence.get("ok") is True:
        return None
    reasons = evidence.get("reasons")
    said = "; ".join(map(str, reasons)) if isinstance(reasons, list) else ""
    return f"speaks against it: {said}" if said else "does not say that it is for it"


def restart_view(case: Case, settings: Settings) -> list[Json] | None:
    """The flags that have to be set by hand: of the members while it waits, of the rest once it is accepted, or to go back.

    ``None`` where nothing has to be set.
    """
    change, members = case.change, case.members or ()
    mine = [replica for replica in settings.replicas if replica.name in members]
    rest = [replica for replica in settings.replicas if replica.name not in members]
    match change.state:
        case "waiting_restart":
            flags = engine_flags(mine, change.variable, change.after)
        case "accepted":
            flags = engine_flags(rest, change.variable, change.after)
        case "rolled_back":
            flags = engine_flags(mine, change.variable, change.before)
        case _:
            flags = {}
    return [{"replica": name, "flags": words} for name, words in flags.items()] or None


def case_view(case: Case, settings: Settings, now_ns: int) -> Json:
    """What the journal says of one change, and what is left to do; nobody has one that was taken back."""
    change, left = case.change, None
    if (back := case.back) is not None:
        note = f"taken back by {back.who} ({back.why}): the journal could not be written yet, that is tried again"
        return {"change": change, "members": (), "left_ns": None, "restart": None, "note": note}
    if change.state == "rolling_out" and change.began_ns is not None:
        left = max(0, change.began_ns + change.window_ns - now_ns)
    return {
        "change": change,
        "members": case.members,
        "left_ns": left,
        "restart": restart_view(case, settings),
        "note": case.note,
    }
