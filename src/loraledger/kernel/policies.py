"""The registered policies: bounded affinity and the baselines that it is measured against."""

from __future__ import annotations

from loraledger.errors import ConfigError
from loraledger.kernel.affinity import BoundedAffinity
from loraledger.kernel.baselines import BoundedHash, LeastLoaded, RoundRobin, StrictAffinity
from loraledger.kernel.baselines_scored import BalancedPandas, DynamoLora, LlmdLora
from loraledger.kernel.policy import Policy
from loraledger.kernel.settings import FleetSettings

_POLICIES = (
    BoundedAffinity,
    RoundRobin,
    LeastLoaded,
    StrictAffinity,
    BoundedHash,
    LlmdLora,
    DynamoLora,
    BalancedPandas,
)


def policy_names() -> tuple[str, ...]:
    """Names of the registered policies, default first."""
    return tuple(policy.name for policy in _POLICIES)


def make_policy(settings: FleetSettings) -> Policy:
    """The policy that ``settings`` names. Raises ``ConfigError`` on an unknown name or parameter, naming the known ones."""
    for policy in _POLICIES:
        if settings.policy == policy.name:
            return policy(settings)
    raise ConfigError(
        f"policy.name: unknown policy {settings.policy!r}; known: {', '.join(policy_names())}", param="policy.name"
    )
