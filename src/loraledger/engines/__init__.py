"""Real replicas behind one protocol: the vLLM driver, and the emulator (a twin on the wall clock behind vLLM's HTTP API)."""
