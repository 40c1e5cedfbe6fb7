"""loraledger: a multi-tenant LoRA endpoint run as three capacity problems (base floor, adapter residency, KV cache)."""

__version__ = "0.1.0"
