"""The orchestrator's API as its clients see it: wire types and a client."""

from evener.api.client import ApiClient, Refused
from evener.api.provenance import UNTRAINED, Provenance, Sampled, Untrained
from evener.api.types import (
    REPORT_S,
    Budget,
    GroupOrder,
    HarnessRef,
    Heartbeat,
    LearnerLease,
    RolloutLease,
    Sampling,
    ScoreOrder,
    TrainedRollout,
    TrainedSequence,
    VersionGrant,
)

__all__ = [
    "REPORT_S",
    "UNTRAINED",
    "ApiClient",
    "Budget",
    "GroupOrder",
    "HarnessRef",
    "Heartbeat",
    "LearnerLease",
    "Provenance",
    "Refused",
    "RolloutLease",
    "Sampled",
    "Sampling",
    "ScoreOrder",
    "TrainedRollout",
    "TrainedSequence",
    "Untrained",
    "VersionGrant",
]
