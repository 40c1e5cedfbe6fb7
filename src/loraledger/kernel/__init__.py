"""Decisions. Pure: no clock, no I/O, no logging. Events in, commands out."""
