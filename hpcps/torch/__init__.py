"""The torch room: what a training script imports as ``hpcps.torch``."""

from __future__ import annotations

from hpcps.torch.costs import LearnedCost
from hpcps.torch.loader import DistributedLoader
from hpcps.torch.optimizer import DistributedOptimizer

__all__ = ["DistributedLoader", "DistributedOptimizer", "LearnedCost"]
