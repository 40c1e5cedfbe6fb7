"""Whether an engine takes an adapter and applies it."""
