"""Digital twin of one engine replica: scheduler, KV blocks, adapter tiers, step time. Pure: time is what the caller says."""
