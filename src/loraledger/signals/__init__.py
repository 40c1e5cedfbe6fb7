"""From the record to answers: the figures of a window, which pool limits and why, and what to change by rule.

Every figure is by class, tenant, adapter or replica: a percentile of everything hides cold tenants behind hot ones.
"""
