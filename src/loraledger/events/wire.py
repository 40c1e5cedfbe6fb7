"""The one byte form of events, commands and changes: what the journal holds and what "byte for byte" compares."""

from __future__ import annotations

import msgspec

from loraledger.events.commands import Command
from loraledger.events.happened import Event
from loraledger.events.words import ResidencyChange

_ENCODER = msgspec.msgpack.Encoder()
_EVENTS: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_CHANGES: msgspec.msgpack.Decoder[list[ResidencyChange]] = msgspec.msgpack.Decoder(list[ResidencyChange])
_COMMANDS: msgspec.msgpack.Decoder[list[Command]] = msgspec.msgpack.Decoder(list[Command])


def encode(words: Event | list[Command] | list[ResidencyChange]) -> bytes:
    """The canonical bytes of one event, or of the commands or changes that one step returned."""
    return _ENCODER.encode(words)


def decode_event(data: bytes) -> Event:
    """The event in ``data``. Raises ``msgspec.DecodeError`` when the bytes are not one."""
    return _EVENTS.decode(data)


def decode_commands(data: bytes) -> list[Command]:
    """The commands in ``data``. Raises ``msgspec.DecodeError`` when the bytes are not a list of them."""
    return _COMMANDS.decode(data)


def decode_changes(data: bytes) -> list[ResidencyChange]:
    """The residency changes in ``data``. Raises ``msgspec.DecodeError`` when the bytes are not a list of them."""
    return _CHANGES.decode(data)
