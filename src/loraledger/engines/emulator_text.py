"""What an emulated model says, and how it counts.

Theory of operation. A token is a word of two syllables, drawn from a BLAKE2b digest of (speaker, prompt, token index). The
speaker is the adapter with the digest of its weights, or ``base``: so another adapter, or another version of one, answers
otherwise, while the same one answers alike on every replica, in every process and under every registration. That makes an
answer by the wrong adapter visible in a test. No real model has these words; nothing here may be taken for quality.

A prompt counts one token per four bytes of UTF-8, plus one: near enough to real tokenizers on English text, and exact to predict.
The number of a token says its bytes, so a text can be had back from its tokens.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import unpack
from typing import Final

from loraledger.events import parse_engine_name

_SYLLABLES: Final = tuple(first + second for first in "bdfghjklmnprstvz" for second in "aeio")
_TOKENS_PER_DIGEST: Final = 32


def count_tokens(text: str) -> int:
    """Prompt tokens of ``text``."""
    return len(text.encode()) // 4 + 1


def tokens_of(text: str) -> list[int]:
    """The tokens of ``text``, ``count_tokens`` of them."""
    data = text.encode()
    pieces = (data[start : start + 4] for start in range(0, len(data) + 4 - len(data) % 4, 4))
    return [int.from_bytes(piece, "big") << 3 | len(piece) for piece in pieces]


def text_of(tokens: list[int]) -> str:
    """The text with these tokens. Raises ``ValueError`` for numbers that are no tokens."""
    pieces = []
    for token in tokens:
        value, size = token >> 3, token & 7
        if token < 0 or size > 4 or value >= 1 << 8 * size:
            raise ValueError(f"{token} is not a token of the emulator")
        pieces.append(value.to_bytes(size, "big"))
    return b"".join(pieces).decode("utf-8", "replace")


def embedding_of(speaker: str, text: str) -> list[float]:
    """The vector of ``text``: 16 numbers from -1 to 1, another one for each speaker and text."""
    digest = blake2b(f"{speaker}\0{text}".encode(), digest_size=64).digest()
    return [number / 2**31 for number in unpack("<16i", digest)]


def speaker_of(engine_name: str | None) -> str:
    """Who answers: ``base``, or the adapter and its digest without the generation of its registration."""
    if engine_name is None:
        return "base"
    parts = parse_engine_name(engine_name)
    return engine_name if parts is None else f"{parts[0]}@{parts[1]}"


class Speech:
    """The endless answer of one speaker to one prompt; only plain ASCII letters and blanks."""

    __slots__ = ("_block", "_digest", "_seed")

    def __init__(self, speaker: str, prompt: str) -> None:
        self._seed = blake2b(f"{speaker}\0{prompt}".encode(), digest_size=16).digest()
        self._block = -1
        self._digest = b""

    def token(self, index: int) -> str:
        """The token at ``index``, from 0; with its leading blank from 1 on."""
        block, place = divmod(index, _TOKENS_PER_DIGEST)
        if block != self._block:
            self._block = block
            self._digest = blake2b(self._seed + block.to_bytes(4, "big")).digest()
        first, second = self._digest[2 * place], self._digest[2 * place + 1]
        word = _SYLLABLES[first & 63] + _SYLLABLES[second & 63]
        return f" {word}" if index else word

    def text(self, tokens: int) -> str:
        """The first ``tokens`` tokens."""
        return "".join([self.token(index) for index in range(tokens)])
