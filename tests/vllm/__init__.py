"""Tests against a real vLLM server on CPU: a tiny random model, real PEFT adapters, two engines."""
