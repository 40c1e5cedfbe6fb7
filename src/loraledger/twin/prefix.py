"""Prefix reuse: which KV blocks hold a prompt's beginning, and in which order free blocks are taken.

Theory of operation. As vLLM 0.32 does it: a prompt's full blocks are found again by what they hold and by their adapter (a reload
of an adapter is another one), from the moment at which a step begins to compute them. A request takes the longest run of such
blocks from its first one on, but computes at least one token itself. Blocks that nobody uses are free, and stay findable until
they are taken: free blocks form one line, findable or not, in which blocks go to the end when they become free, a request's last
block before its first, and from whose head new blocks are taken. Blocks of generated tokens are not shared here, because the
caller does not say what they hold; a block that two requests compute at the same time is findable once.

Plain free blocks are kept as counts, so that a run of decode steps takes its blocks at once.
"""

from __future__ import annotations

from collections import OrderedDict

from loraledger.twin.requests import BlockKey, Request


class PrefixCache:
    """The findable blocks of one replica of ``blocks`` KV blocks, ``ratio`` of them to each number of a request's prefix."""

    __slots__ = ("_free", "_serial", "_users", "hits", "ratio")

    def __init__(self, blocks: int, ratio: int) -> None:
        self.ratio = ratio
        self.hits = 0
        self._users: dict[BlockKey, int] = {}
        self._free: OrderedDict[BlockKey | int, int] = OrderedDict(
            {0: blocks}
        )  # a findable block, or plain ones and how many
        self._serial = 0

    def key(self, request: Request, index: int) -> BlockKey:
        """The name of the ``index``-th block of ``request``'s prompt."""
        adapter = None if request.adapter is None else request.adapter.key
        return adapter, request.prefix[index // self.ratio], index % self.ratio

    def nameable(self, request: Request, tokens: int, block_size: int) -> int:
        """How many full blocks of the first ``tokens`` tokens have names."""
        return min(min(tokens, request.prompt) // block_size, len(request.prefix) * self.ratio)

    def find(self, request: Request, block_size: int) -> tuple[list[BlockKey], int]:
        """The blocks that ``request`` could reuse, and how many of them are free now."""
        found, free = [], 0
        for index in range(self.nameable(request, request.need - 1, block_size)):
            key = self.key(request, index)
            users = self._users.get(key)
            if users is None:
                break
            found.append(key)
            free += users == 0
        return found, free

    def reuse(self, request: Request, keys: list[BlockKey]) -> None:
        """``request`` starts with these blocks."""
        self.hits += len(keys)
        request.held = keys
        for key in keys:
            if self._users[key] == 0:
                del self._free[key]
            self._users[key] += 1

    def take(self, count: int) -> None:
        """``count`` blocks are taken from the head of the line; what they held cannot be found any more."""
        free = self._free
        while count:
            head, blocks = next(iter(free.items()))
            if not isinstance(head, int):
                del free[head], self._users[head]
                count -= 1
            elif blocks > count:
                free[head] = blocks - count
                return
            else:
                del free[head]
                count -= blocks

    def publish(self, request: Request, block_size: int) -> None:
        """``request`` computes its prompt up to ``computed``: its full blocks can be found."""
        held = request.held
        for index in range(len(held), self.nameable(request, request.computed, block_size)):
            key = self.key(request, index)
            if key in self._users:
                return  # another request's copy is the one that is found; this one and what follows it stay private
            self._users[key] = 1
            held.append(key)

    def give_back(self, request: Request, blocks: int) -> int:
        """``request`` lets go of its ``blocks`` blocks; returns how many of them are free now."""
        plain = blocks - len(request.held)
        if plain:
            self._serial += 1
            self._free[self._serial] = plain
        freed = plain
        for key in reversed(request.held):
            self._users[key] -= 1
            if self._users[key] == 0:
                self._free[key] = 1
                freed += 1
        request.held = []
        return freed
