"""Pure decisions: facts in, a frozen decision with its reason out.

A policy is made with its settings and has one method, ``decide``. It reads no clock, environment or
file and logs nothing: the time is an argument, the caller logs the reason. Same facts, same
decision, on every rank.
"""

from __future__ import annotations

from hpcps.policy.capacity import CapacityFit, ChangeDecision, DetectChange, FitCapacity, TimedStep
from hpcps.policy.codec_choice import (
    ChoiceMemory,
    CodecChoice,
    CodecCost,
    CodecDecision,
    CodecFacts,
    PredictedCost,
    SetBack,
)
from hpcps.policy.codec_rules import CodecRules, auto_candidates
from hpcps.policy.grouping import GroupingDecision, GroupWorkers
from hpcps.policy.link_estimate import LinkEstimate, LinkFacts
from hpcps.policy.partition import Partition, Shares, equal_shares, ideal_speedup, warmup_shares
from hpcps.policy.placement import PlaceRoles, RolesDecision
from hpcps.policy.routing import PlaceShards
from hpcps.policy.staleness import StalenessDecision, StalenessPolicy
from hpcps.policy.window import WindowDecision, WindowFacts, WindowPolicy

__all__ = [
    "CapacityFit",
    "ChangeDecision",
    "ChoiceMemory",
    "CodecChoice",
    "CodecCost",
    "CodecDecision",
    "CodecFacts",
    "CodecRules",
    "DetectChange",
    "FitCapacity",
    "GroupWorkers",
    "GroupingDecision",
    "LinkEstimate",
    "LinkFacts",
    "Partition",
    "PlaceRoles",
    "PlaceShards",
    "PredictedCost",
    "RolesDecision",
    "SetBack",
    "Shares",
    "StalenessDecision",
    "StalenessPolicy",
    "TimedStep",
    "WindowDecision",
    "WindowFacts",
    "WindowPolicy",
    "auto_candidates",
    "equal_shares",
    "ideal_speedup",
    "warmup_shares",
]
