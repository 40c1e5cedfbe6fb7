"""The settings of a gateway: ``loraledger.yaml``, environment and flags, typed, checked, with origins."""

from loraledger.config.checks import warnings
from loraledger.config.loader import Loaded, load, settings_from
from loraledger.config.origin import Origin, dotted, leaves
from loraledger.config.schema import (
    AdapterSpec,
    Limits,
    Replica,
    Settings,
    Tenant,
    json_schema,
)
from loraledger.config.secrets import SecretRef, Secrets, hash_key, resolve_secret, resolve_secrets

__all__ = [
    "AdapterSpec",
    "Limits",
    "Loaded",
    "Origin",
    "Replica",
    "SecretRef",
    "Secrets",
    "Settings",
    "Tenant",
    "dotted",
    "hash_key",
    "json_schema",
    "leaves",
    "load",
    "resolve_secret",
    "resolve_secrets",
    "settings_from",
    "warnings",
]
