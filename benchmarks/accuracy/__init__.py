"""How near replay comes to a real vLLM: `python -m benchmarks.accuracy`, or `make accuracy`."""
