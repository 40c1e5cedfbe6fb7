"""What runs came to: tables from their record files, the offline bound, pairs, guardrails."""
