"""Changing a fleet: one variable at a time, with a target, guardrails and a way back."""
