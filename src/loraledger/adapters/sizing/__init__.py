"""The base model and what adapters cost on it, on each tier of each engine."""
