"""Groups by a script in place of the policy, so that a change comes every few steps whatever the speeds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import pytest

from hpcps.plan import Group, Grouping
from hpcps.policy.grouping import GroupingDecision
from hpcps.policy.regroup import RegroupFacts
from hpcps.protocol import regrouping

__all__ = ["Groups", "cycle", "follow"]

Groups: TypeAlias = Sequence[Sequence[int]]
"""Numbers of workers, counted from 1."""


class Scripted:
    """The next of some groupings whenever every worker has made some steps.

    Args:
        groupings: gives the next one.
        every: steps.
    """

    def __init__(self, groupings: Callable[[], Groups], every: int) -> None:
        self._groupings, self._every = groupings, every

    def decide(self, facts: RegroupFacts) -> GroupingDecision:
        """The next grouping, or the one in force."""
        present = facts.present.grouping
        if facts.num_steps < self._every:
            return GroupingDecision(grouping=present, reason="held", changed=False, ask_step=self._every)
        ranks = sorted(facts.workers)
        wanted = [tuple(ranks[number - 1] for number in group) for group in self._groupings()]
        groups = tuple(Group(index=index, workers=workers) for index, workers in enumerate(wanted))
        made = Grouping(generation=present.generation + 1, groups=groups)
        return GroupingDecision(grouping=made, reason="scripted", ask_step=self._every)


def follow(monkeypatch: pytest.MonkeyPatch, groupings: Callable[[], Groups], *, every: int = 4) -> None:
    """Let a coordinator of this process, made from now on, form these groups once it has measured all workers."""
    monkeypatch.setattr(regrouping, "Regroup", lambda config, size: Scripted(groupings, every))


def cycle(groupings: Sequence[Groups]) -> Callable[[], Groups]:
    """These, over and over."""
    endless = itertools.cycle(groupings)
    return lambda: next(endless)
