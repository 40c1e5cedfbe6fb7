"""The change desk: takes proposals, tries them on a part of the fleet, watches, and accepts them or takes them back by itself.

Theory of operation. Every step of a change is in the journal of changes, on the disk, before the kernel is told of it. So a process
that was killed at any moment finds in the journal what has to be so, and tells the kernel again at its start, before anyone
listens: what is being tried goes on where it stood, what was accepted is held as long as the settings file does not say otherwise,
and what the kernel remembers beyond that is ended. Telling the kernel what it knows changes nothing.

Taking back comes before everything: if the disk refuses the entry, the kernel is told all the same, nothing is judged any more, and
the entry is tried again every second (``_take_back``, who asks for it and the gateway's own verdicts alike). A process that dies
before the disk took it is the one case that cannot be helped: the next one finds a rollout in the journal, and goes on with it.

One step at a time (a lock), written in one thread of its own: an fsync took 4 ms at the median of 50 on the disk of two shared
cores, 10 ms at the most, and a request costs the data plane 0.06 ms. Who asks for a step has it on the disk when the answer comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec

from loraledger.conductor.fold import Emitted
from loraledger.errors import ConfigError, ConflictError, UnavailableError
from loraledger.events import RolloutEnded, RolloutSet
from loraledger.gateway.changes_case import Case, Json, Proposal, TakenBack, case_view
from loraledger.gateway.changes_checks import Checks, Host
from loraledger.gateway.changes_force import names_of, spelled
from loraledger.gateway.changes_watch import Watched
from loraledger.gateway.control_edge import unknown
from loraledger.gateway.exposition import PREFIX, Family
from loraledger.operate.change import Change, State, Trigger, Value, conflict, held
from loraledger.operate.journal import ChangeJournal, Entry, lasting
from loraledger.operate.watch import TEST, Verdict
from loraledger.units import NS_PER_S

log = logging.getLogger("loraledger")
GATEWAY: Final = "gateway"
"""Who, in the journal, where nobody asked."""
AGAIN_S: Final = 1.0
"""Between two looks whether an engine came back with its new setting, and two tries to write down what was taken back."""
Kind = Literal["propose"] | Trigger


class ChangeDesk:
    """The changes of one gateway. ``open``, ``resume``, let ``watch`` run; ``close`` it after use."""

    def __init__(self, host: Host) -> None:
        self.cases: dict[str, Case] = {}
        self._host = host
        self._record = Path()
        self._journal: ChangeJournal | None = None
        self._checks = Checks(host)
        self._watched: dict[str, Watched] = {}
        self._lock = asyncio.Lock()
        self._news = asyncio.Event()
        self._writer = ThreadPoolExecutor(1, "changes")
        self._closed = False

    # --- start and stop -----------------------------------------------------------------------------------------------

    def open(self, record: Path) -> None:
        """Read the journal in ``record``. Raises ConfigError when it cannot be used, InputFileError when it is damaged."""
        self._record = record
        try:
            self._journal = ChangeJournal(record / "changes")
        except OSError as error:
            raise ConfigError(f"the journal of changes in {record} cannot be used: {error.strerror}") from error
        for entry in self._journal.entries:
            self._fold(entry)

    def resume(self) -> None:
        """Make the kernel's state what the journal says. Call it before anyone listens."""
        self._settle()
        for case in self.cases.values():
            if case.change.state == "rolling_out":
                if (reason := self._checks.cannot_go_on(case)) is not None:
                    log.warning("change %s is taken back: %s", case.change.id, reason)
                    case.back = TakenBack(self._after(case.change, "roll_back", reason), GATEWAY, reason, None)
                    self._found("roll_back", reason, case.back.change)  # refused: ``look`` tries again
                else:
                    self._watch(case, self._host.now())
        trials = [self.cases[name] for name in self._watched]
        wanted = {change.id: self._set(change, None) for change in self._checks.held.values()}
        wanted |= {case.change.id: self._set(case.change, case.members) for case in trials if case.change.live}
        for name in [name for name in self._checks.fleet.state.rollouts if name not in wanted]:
            self._host.feed(RolloutEnded(self._host.now(), name))
        for event in wanted.values():
            self._host.feed(event)

    async def close(self) -> None:
        """Let what was taken back and the entry in hand reach the disk, and give the journal back. May be called twice."""
        for case in () if self._closed else [case for case in self.cases.values() if case.back is not None]:
            await self._try_again(case)
        self._closed = True
        await asyncio.to_thread(self._writer.shutdown)
        if self._journal is not None:
            self._journal.close()

    def _settle(self) -> None:
        """Find what was accepted and has to be held; what the settings file ended is journalled."""
        assert self._journal is not None
        accepted = lasting(self._journal.entries)
        # A parameter is one of a policy: which one is in force comes first.
        for variable in sorted(accepted, key=lambda variable: variable != "policy"):
            self._settle_one(variable, accepted[variable])

    def _settle_one(self, variable: str, accepted: list[Change]) -> None:
        value: Value = None
        with contextlib.suppress(ValueError):  # no one value, no such parameter any more: the file counts
            value = self._checks.configured(variable)
        last, over = held(value, accepted)
        for change in over:
            if value == change.after:
                self._let_go(change, f"the settings say {spelled(value)} too")
            else:
                self._let_go(change, f"the settings say {spelled(value)}, not {spelled(change.after)}: they count")
        if last is not None and (objection := self._checks.problem(last, None)) is not None:
            self._let_go(last, f"it cannot be held: {objection}")
        elif last is not None:
            self._checks.held[variable] = last

    def _let_go(self, change: Change, note: str) -> None:
        log.warning("change %s, accepted: %s", change.id, note)
        self._found("accept", note, change, {"settled": note})

    def _found(self, kind: Kind, why: str, change: Change, evidence: Json | None = None) -> None:
        """Write down what a start found. It goes on where the disk refuses that: the next one finds the same."""
        try:
            self._fold(self._append(kind, GATEWAY, why, change, evidence))
        except UnavailableError as error:
            log.error("change %s: %s", change.id, error.message)

    # --- watching -----------------------------------------------------------------------------------------------------

    @property
    def watching(self) -> bool:
        """Whether anything is being tried."""
        return bool(self._watched)

    def observe(self, rows: Emitted) -> None:
        """Rows that the conductor finished."""
        for table, row in rows:
            if table == "requests":
                for watched in self._watched.values():
                    watched.take(row)

    async def watch(self) -> None:
        """Decide, for ever. Raises UnavailableError when the disk refuses a decision: call it again."""
        while True:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._news.wait()
            await self.look()

    async def look(self) -> None:
        """Decide on all that is due now. Raises UnavailableError where the disk refused a decision, for the first time."""
        now, cases = self._host.now(), self.cases.values()
        due = [self._try_again(case) for case in cases if case.back is not None]
        due += [self._judge(watched) for watched in self._watched.values() if watched.next_ns <= now]
        due += [self._look_at_engines(case) for case in cases if case.change.state == "waiting_restart"]
        # What one is refused must not hold up the others. A fault of ours comes before what the disk refused.
        errors = [error for error in await asyncio.gather(*due, return_exceptions=True) if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, UnavailableError)):
            raise error

    def _pause(self) -> float | None:
        """Seconds until something has to be looked at; ``None``: until there is news."""
        now = self._host.now()
        pauses = [max(0, watched.next_ns - now) / NS_PER_S for watched in self._watched.values()]
        if any(case.back is not None or case.change.state == "waiting_restart" for case in self.cases.values()):
            pauses.append(AGAIN_S)
        return min(pauses, default=None)

    async def _judge(self, watched: Watched) -> None:
        verdict = await watched.look(self._record, self._host.now())
        change = watched.change
        async with self._lock:
            if self._watched.get(change.id) is not watched:
                return  # ended by hand meanwhile
            if verdict.action == "accept":
                await self._accept(change, verdict)
            elif verdict.action == "roll_back":
                await self._take_back(self._case(change.id), GATEWAY, verdict.reason, verdict)

    async def _try_again(self, case: Case) -> None:
        async with self._lock:
            if (back := case.back) is not None:
                with contextlib.suppress(UnavailableError):  # that was said when it was refused first
                    await self._take_back(case, back.who, back.why, back.verdict)

    async def _look_at_engines(self, case: Case) -> None:
        async with self._lock:
            change, settings = case.change, self._host.settings
            if change.state != "waiting_restart" or case.back is not None:
                return
            members = case.members or ()
            if change.variable == "replicas":
                members = tuple(name for name in names_of(settings, "replica") if name not in case.starts)
                ready = len(settings.replicas) == change.after and all(
                    self._checks.fleet.state.replicas[name].up for name in members
                )
            else:
                ready = all(engine.shows == change.after for engine in self._checks.engines(case).values())
            if ready and members:
                await self._begin(change, GATEWAY, f"{', '.join(members)} came back with the new value", members)

    # --- what is shown ------------------------------------------------------------------------------------------------

    def view(self, name: str) -> Json:
        """Everything about one change. Raises UnknownPathError."""
        case, watched = self._case(name), self._watched.get(name)
        assert self._journal is not None
        entries = [entry for entry in self._journal.entries if entry.change.id == name]
        waiting = case.change.state == "waiting_restart"
        held = self._checks.held.get(case.change.variable)
        ended = case.verdict if case.back is None else case.back.verdict
        return {
            **case_view(case, self._host.settings, self._host.now()),
            "entries": entries,
            "verdict": ended if watched is None else watched.verdict,
            "engines": self._checks.engines(case) if waiting else None,
            "held": held is not None and held.id == name,
        }

    def series(self) -> Iterator[Family]:
        """Changes by state, for a scrape."""
        family = Family("gauge", f"{PREFIX}changes", "Changes in the journal of changes, by state.", ("state",))
        for state in get_args(State):
            family.set((state,), sum(case.change.state == state for case in self.cases.values()))
        yield family

    # --- what is asked ------------------------------------------------------------------------------------------------

    async def propose(self, asked: Proposal) -> Case:
        """Take a proposal in. Raises BadRequestError naming the field, ConflictError where it does not fit how things stand."""
        async with self._lock:
            change = self._checks.proposal(asked, f"c{len(self.cases) + 1}")
            if (objection := conflict(change, [case.change for case in self.cases.values()])) is not None:
                raise ConflictError(objection, code="change_conflict", param="variable")
            return await self._write("propose", asked.who, asked.why, change)

    async def replay(self, name: str, who: str, why: str, evidence: Json) -> Case:
        """Attach what a replay of the change showed. Raises ConflictError when it rests on a stale profile."""
        async with self._lock:
            change = self._case(name).change
            if evidence.get("stale") is not False:
                raise ConflictError(
                    "the profile is stale: calibrate it on these engines, then replay", code="profile_stale"
                )
            return await self._step(change, "replay", who, why, evidence)

    async def roll_out(self, name: str, who: str, why: str, share: float | None, although: bool = False) -> Case:
        """Try it: at once, or as soon as engines came back with it; ``although``: its replay speaks against it.

        Raises ConflictError, BadRequestError.
        """
        async with self._lock:
            case = self._case(name)
            change = case.change
            self._after(change, "roll_out" if change.live else "await", why)
            if case.against is not None and not although:
                raise ConflictError(
                    f'the replay of {name} {case.against}; say "although": true, and why, to roll it out all the same',
                    code="replay_against",
                    param="although",
                )
            if share is not None:
                wider = msgspec.structs.replace(change.population, share=share)
                change = self._checks.checked(msgspec.structs.replace(change, population=wider))
            self._checks.must_be_in_force(change)
            members = self._checks.members_of(change)
            if change.live:
                return await self._begin(change, who, why, members)
            replicas = self._checks.fleet.state.replicas
            starts = {name: replica.process_start for name, replica in replicas.items()}
            evidence: Json = {"members": members, "process_starts": starts}
            case = await self._step(change, "await", who, why, evidence)
            self._news.set()
            return case

    async def roll_back(self, name: str, who: str, why: str) -> Case:
        """Take it back now. Raises ConflictError when it is not being tried, UnavailableError when that is not written yet."""
        async with self._lock:
            watched = self._watched.get(name)
            verdict = None if watched is None else watched.verdict
            return await self._take_back(self._case(name), who, why, verdict)

    async def withdraw(self, name: str, who: str, why: str) -> Case:
        """End it before it was tried. Raises ConflictError when it was."""
        async with self._lock:
            return await self._step(self._case(name).change, "withdraw", who, why)

    # --- steps --------------------------------------------------------------------------------------------------------

    async def _begin(self, change: Change, who: str, why: str, members: tuple[str, ...]) -> Case:
        case = await self._step(change, "roll_out", who, why, {"members": members})
        if case.change.live:
            self._host.feed(self._set(case.change, members))
        self._watch(case, case.change.began_ns or 0)
        return case

    async def _accept(self, change: Change, verdict: Verdict) -> None:
        log.info("change %s is accepted: %s", change.id, verdict.reason)
        case = await self._step(change, "accept", GATEWAY, verdict.reason, _evidence(verdict))
        self._watched.pop(change.id, None)
        if change.live:
            self._host.feed(self._set(case.change, None))
            before = self._checks.held.get(change.variable)
            self._checks.held[change.variable] = case.change
            if before is not None:
                self._host.feed(RolloutEnded(self._host.now(), before.id))

    async def _take_back(self, case: Case, who: str, why: str, verdict: Verdict | None) -> Case:
        """End it, whatever the disk says. Who asked first is who took it back."""
        change, refused = case.change, case.back
        back = refused or TakenBack(self._after(change, "roll_back", why), who, why, verdict)
        evidence = None if back.verdict is None else _evidence(back.verdict)
        try:
            await self._write("roll_back", back.who, back.why, back.change, evidence)
        except UnavailableError as error:
            case.back = back
            self._end(change)
            self._news.set()
            as_before = ", and the fleet is as before" if change.live else ""
            said = f"{change.id} is ended{as_before}; {error.message}: its entry is tried again every second"
            if refused is None:
                log.error("change %s is taken back: %s; %s", change.id, back.why, said)
            raise UnavailableError(said, code=error.code) from error
        log.warning("change %s is taken back: %s", change.id, back.why)
        self._end(change)
        return case

    def _end(self, change: Change) -> None:
        """Judge it no more; nobody has it. Once."""
        if self._watched.pop(change.id, None) is not None and change.live:
            self._host.feed(RolloutEnded(self._host.now(), change.id))

    async def _step(self, change: Change, trigger: Trigger, who: str, why: str, evidence: Json | None = None) -> Case:
        return await self._write(trigger, who, why, self._after(change, trigger, why), evidence)

    def _after(self, change: Change, trigger: Trigger, why: str) -> Change:
        try:
            return change.step(trigger, self._host.now(), why)
        except ValueError as error:
            raise ConflictError(str(error), code="change_conflict") from error

    async def _write(self, kind: Kind, who: str, why: str, change: Change, evidence: Json | None = None) -> Case:
        loop = asyncio.get_running_loop()
        return self._fold(await loop.run_in_executor(self._writer, self._append, kind, who, why, change, evidence))

    def _append(self, kind: Kind, who: str, why: str, change: Change, evidence: Json | None = None) -> Entry:
        assert self._journal is not None
        try:
            again: Json = msgspec.json.decode(msgspec.json.encode(evidence or {}))  # as it will be read
            return self._journal.append(self._host.now(), kind, who, why, change, again)
        except OSError as error:
            raise UnavailableError(
                f"the journal of changes cannot be written: {error}", code="change_journal_unwritable"
            ) from error

    def _fold(self, entry: Entry) -> Case:
        case = self.cases.setdefault(entry.change.id, Case(entry.change))
        case.fold(entry)
        return case

    def _set(self, change: Change, members: tuple[str, ...] | None) -> RolloutSet:
        unit = change.population.unit
        return RolloutSet(self._host.now(), change.id, change.variable, spelled(change.after), unit, members)

    def _watch(self, case: Case, since_ns: int) -> None:
        usual = None if case.change.variable == "replicas" else self._usual(case)
        self._watched[case.change.id] = Watched(case.change, case.members or (), since_ns, usual)
        self._news.set()

    def _usual(self, case: Case) -> tuple[int, int]:
        """The time before, by which both parts are known: as long as the rollout may take, and since anything else was changed."""
        change = case.change
        until = case.waiting_since or change.began_ns or 0
        others = (other.change for other in self.cases.values() if other.change.id != change.id)
        moments = [
            at for other in others for at in (other.began_ns, other.ended_ns) if at is not None and other.began_ns
        ]
        return max([until - change.window_ns, *(at for at in moments if at < until)]), until

    def _case(self, name: str) -> Case:
        found = self.cases.get(name)
        if found is None:
            raise unknown("change", name, self.cases)
        return found


def _evidence(verdict: Verdict) -> Json:
    return {"verdict": verdict, "test": TEST}
