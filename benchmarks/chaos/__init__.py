"""Faults of every kind under traffic, and a judge: ``python -m benchmarks.chaos``."""
