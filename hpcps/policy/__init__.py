"""Pure decisions: facts in, a frozen decision with its reason out.

A policy is made with its settings and has one method, ``decide``. It reads no clock, environment or
file and logs nothing: the time is an argument, the caller logs the reason. Same facts, same
decision, on every rank.
"""

from __future__ import annotations

from hpcps.policy.assign import Assignment, AssignSamples
from hpcps.policy.capacity import CapacityFit, FitCapacity, TimedStep
from hpcps.policy.change_point import ChangeDecision, DetectChange, LevelMemory
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
from hpcps.policy.guard import GuardDecision, GuardFacts, GuardMemory, GuardRail
from hpcps.policy.learn_cost import CostRow, CostWeights, LearnCost
from hpcps.policy.link_estimate import LinkEstimate, LinkFacts
from hpcps.policy.memory import FitMemory, MemoryCap
from hpcps.policy.partition import Partition, Shares, equal_shares, warmup_shares
from hpcps.policy.placement import PlaceRoles, RolesDecision
from hpcps.policy.rebalance import Rebalance, RebalanceDecision, RoutingFacts, ServerState, ShardMove, ShardState
from hpcps.policy.regroup import Regroup, RegroupFacts
from hpcps.policy.routing import PlaceShards
from hpcps.policy.server_rate import EstimateRate, Look, RateEstimate, RateWithMore
from hpcps.policy.speed_classes import WorkerFacts
from hpcps.policy.staleness import StalenessDecision, StalenessPolicy
from hpcps.policy.window import WindowDecision, WindowFacts, WindowPolicy

__all__ = [
    "AssignSamples",
    "Assignment",
    "CapacityFit",
    "ChangeDecision",
    "ChoiceMemory",
    "CodecChoice",
    "CodecCost",
    "CodecDecision",
    "CodecFacts",
    "CodecRules",
    "CostRow",
    "CostWeights",
    "DetectChange",
    "EstimateRate",
    "FitCapacity",
    "FitMemory",
    "GroupWorkers",
    "GroupingDecision",
    "GuardDecision",
    "GuardFacts",
    "GuardMemory",
    "GuardRail",
    "LearnCost",
    "LevelMemory",
    "LinkEstimate",
    "LinkFacts",
    "Look",
    "MemoryCap",
    "Partition",
    "PlaceRoles",
    "PlaceShards",
    "PredictedCost",
    "RateEstimate",
    "RateWithMore",
    "Rebalance",
    "RebalanceDecision",
    "Regroup",
    "RegroupFacts",
    "RolesDecision",
    "RoutingFacts",
    "ServerState",
    "SetBack",
    "ShardMove",
    "ShardState",
    "Shares",
    "StalenessDecision",
    "StalenessPolicy",
    "TimedStep",
    "WindowDecision",
    "WindowFacts",
    "WindowPolicy",
    "WorkerFacts",
    "auto_candidates",
    "equal_shares",
    "warmup_shares",
]
