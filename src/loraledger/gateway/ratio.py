"""How many tokens a prompt of so many bytes is, learnt from what engines report.

The gateway has no tokenizer: it would cost milliseconds and one per model. Decisions need the order of magnitude before the
engine says the true figure, so bytes per token is kept as a moving average for each path (a chat body has roles and markup
that a completion's prompt has not). It begins at 4.0 bytes, the usual figure for English text.
"""

from __future__ import annotations

from typing import Final

PRIOR: Final = 4.0
WEIGHT: Final = 0.05
"""Share of a new observation: the memory is about 20 requests."""


class TokenRatio:
    """Bytes per token for each path, and how far off its estimates were."""

    def __init__(self) -> None:
        self._ratio: dict[str, float] = {}
        self._error: dict[str, float] = {}

    def estimate(self, path: str, size: int) -> int:
        """Tokens of a prompt of ``size`` bytes, at least 1."""
        return max(1, round(size / self._ratio.get(path, PRIOR)))

    def learn(self, path: str, size: int, tokens: int) -> None:
        """An engine counted ``tokens`` in a prompt of ``size`` bytes. Without either there is nothing to learn."""
        if size <= 0 or tokens <= 0:
            return
        off = abs(self.estimate(path, size) - tokens) / tokens
        error, ratio = self._error.get(path, off), self._ratio.get(path, PRIOR)
        self._error[path] = error + WEIGHT * (off - error)
        self._ratio[path] = ratio + WEIGHT * (size / tokens - ratio)

    def bytes_per_token(self, path: str) -> float:
        """The figure in use for this path."""
        return self._ratio.get(path, PRIOR)

    def relative_error(self, path: str) -> float | None:
        """Moving average of abs(estimate - tokens) / tokens; None before the first observation."""
        return self._error.get(path)
