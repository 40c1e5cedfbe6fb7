"""Published measurements of multi-LoRA serving, predicted by the twin, in one table: ``python -m benchmarks.reproduce DATA``."""
