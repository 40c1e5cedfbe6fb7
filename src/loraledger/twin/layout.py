"""What every layout of an engine has in common: a batch that decodes, its adapters, and the tokens that a step gives out.

Theory of operation. A layout decides what runs in a step and what that step moves; a replica owns time and the calls from outside.
Between two steps the replica tells it of arrivals and cancellations (``add``, ``drop``) and of load calls (``load``); ``begin``
decides the next *run*: ``steps`` equal steps, of which the first takes ``first_ps`` and each further one ``growth_ps`` more, from
the time that ``begin`` returns (which is later than now by what the step has to load). A run is more than one step only if
nothing but decoding happens in it and nobody watches single tokens. If something comes in, the replica lowers ``steps`` to
where the run is cut. ``complete`` ends the run. ``steps`` 0: there was nothing to run after all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

from loraledger.events import MoveVerb, Tier
from loraledger.twin.decodes import Decodes
from loraledger.twin.events import TokenOut, TwinEvent
from loraledger.twin.profile import TwinProfile
from loraledger.twin.requests import Adapter, Request


class Layout(ABC):
    """The queue, the batch and the memory of one replica.

    ``batch`` maps the adapters of running requests, in the order in which they joined, to how many use them. ``missing``: a step
    needed this adapter and its files are gone; nothing works from then on. ``given_up``: requests that the layout itself rejected,
    for the owner to take.
    """

    def __init__(self, profile: TwinProfile, every_token: bool, block_size: int) -> None:
        self._profile = profile
        self._every_token = every_token
        self._decodes = Decodes(block_size)
        self._costs = [profile.decode_ps(count) for count in range(profile.max_seqs + 1)]
        self._by_count = [profile.adapters_ps(count, ()) for count in range(profile.max_seqs + 1)]
        self._completing: list[Request] = []  # prompts that will be complete when the step in flight ends
        self._joined: list[Adapter] = []  # of the batch, since the last step began
        self._left: list[Adapter] = []  # the batch, since the last step began
        self.batch: dict[Adapter, int] = {}
        self.missing: Adapter | None = None
        self.given_up: list[Request] = []
        self.preemptions = 0
        self.steps = 0
        self.first_ps = 0
        self.growth_ps = 0

    # --- what a layout decides ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether there is anything to step for."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Requests in line, preempted ones included."""

    @property
    @abstractmethod
    def running(self) -> int:
        """Requests that hold a place in the batch."""

    @abstractmethod
    def used_blocks(self, steps: int) -> int:
        """KV blocks in use while the step runs that comes ``steps`` steps after the first one of the run."""

    @abstractmethod
    def refuses(self, prompt: int, output: int, adapter: Adapter | None) -> bool:
        """Whether a request of these tokens can never run, even alone."""

    weighs_adapters: ClassVar[bool] = False
    """Whether ``refuses`` asks which adapter it is."""

    @abstractmethod
    def rejects(self, adapter: Adapter) -> bool:
        """Whether ``adapter`` has more bytes than there is a place for."""

    @abstractmethod
    def add(self, at: int, request: Request) -> None:
        """A request that arrived at ``at`` joins the line."""

    @abstractmethod
    def drop(self, request: Request, now: int, out: list[TwinEvent]) -> bool:
        """A request is cancelled at ``now``, between steps. ``False``: it was not here."""

    @abstractmethod
    def load(self, adapter: Adapter, now: int, out: list[TwinEvent]) -> int:
        """A load call from ``now`` on; returns when it is done. It holds the engine."""

    def move(
        self,
        name: str,
        adapter: Adapter | None,
        verb: MoveVerb,
        in_flight: Collection[str],
        now: int,
        out: list[TwinEvent],
    ) -> int | str:
        """A command of the probe, from ``now`` on; returns when it is done, or why it is refused. It holds the engine.

        ``adapter`` is registered under ``name``, if anything is; ``in_flight``: names of adapters with open requests.
        """
        return "not_modelled"

    @abstractmethod
    def tier(self, adapter: Adapter) -> Tier:
        """Where the bytes of ``adapter`` are."""

    @abstractmethod
    def begin(self, now: int, out: list[TwinEvent]) -> int:
        """Decide the next run; returns when its loads are done and its first step begins."""

    @abstractmethod
    def _free(self, request: Request) -> None:
        """``request`` leaves the batch: its memory is free."""

    def _ran(self, further: int) -> None:  # noqa: B027 - most layouts have nothing to take
        """The run that is over had ``further`` steps after its first one: take what they used beyond it."""

    def _adapters_cost(self, adapters: Collection[Adapter]) -> int:
        """What these adapters add to a step. Their ranks are only looked at if they count."""
        profile = self._profile
        if profile.rank_step_ps:
            return profile.adapters_ps(len(adapters), [adapter.rank for adapter in adapters])
        return self._by_count[len(adapters)]

    # --- a run ends ---------------------------------------------------------------------------------------------------

    def complete(self, end: int, out: list[TwinEvent]) -> list[Request]:
        """The run in flight is over: its tokens go to ``out``. Returns the requests that are over with it."""
        decodes, steps, every_token = self._decodes, self.steps, self._every_token
        if steps > 1:
            self._ran(steps - 1)
        elif every_token:
            self._tokens(end, out)
        over = decodes.done(steps)
        for request in over:
            if not every_token and not request.ended:
                out.append(TokenOut(end, request.id, request.output, False, True))
            decodes.leave(request)
        if self._completing:
            over.extend(self._first_tokens(end, out))
        for request in over:
            request.state = "over"
            self._leave_batch(request)
        return over

    def _tokens(self, end: int, out: list[TwinEvent]) -> None:
        """The step in flight, which is the only one of its run, gives each decoding sequence a token."""
        step = self._decodes.step
        for request in self._decodes.running.values():
            if not request.ended:
                left = request.finish_step - step
                out.append(TokenOut(end, request.id, request.output - left, False, left == 0))

    def _first_tokens(self, end: int, out: list[TwinEvent]) -> list[Request]:
        """Prompts that are complete give a token and then decode; returns those that end with it."""
        over = []
        for request in self._completing:
            request.generated = generated = request.generated + 1
            first, last = generated == 1, generated == request.output
            if not request.ended and (first or last or self._every_token):
                out.append(TokenOut(end, request.id, generated, first, last))
            if last:
                over.append(request)
            else:
                self._decodes.join(request)
        self._completing = []
        return over

    def _release(self, request: Request) -> None:
        request.state = "over"
        self._leave_batch(request)

    def _join_batch(self, request: Request) -> None:
        request.state = "prefilling"
        adapter = request.adapter
        if adapter is None:
            return
        users = self.batch.get(adapter)
        if users is None:
            self._joined.append(adapter)
            self.batch[adapter] = 1
        else:
            self.batch[adapter] = users + 1

    def _leave_batch(self, request: Request) -> None:
        self._free(request)
        adapter = request.adapter
        if adapter is None:
            return
        users = self.batch[adapter] - 1
        if users:
            self.batch[adapter] = users
        else:
            del self.batch[adapter]
            self._left.append(adapter)
