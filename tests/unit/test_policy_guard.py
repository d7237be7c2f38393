"""When a run slides towards sync and back, as stories: losses a look on the left, changes of level on the right."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest

from hpcps.config import GuardConfig
from hpcps.errors import PlanError
from hpcps.policy import GuardDecision, GuardFacts, GuardMemory, GuardRail

CONFIG = GuardConfig(loss_rise_frac=0.1, min_agreement=-0.2, hold_steps=50)
STEP = 10
"""Steps a look."""
FLAT = [1.0, 1.01] * 10
"""Twenty looks with a change of 0.01 each: a drift is a rise by 0.1, an explosion by 1."""


def looks(
    losses: Sequence[float | None],
    *,
    agreements: Sequence[float | None] = (),
    config: GuardConfig = CONFIG,
    mode: str = "async",
    num_groups: int = 4,
) -> tuple[list[tuple[int, int]], GuardDecision]:
    """Let the rail look; returns (number of the look, new level) of every change, and the last decision."""
    rail, memory, changes = GuardRail(config), GuardMemory(), []
    decision = GuardDecision(level=0, memory=memory, reason="")
    for number, loss in enumerate(losses):
        agreement = agreements[number] if agreements else None
        facts = GuardFacts(
            mode=mode, num_groups=num_groups, step=STEP * (number + 1), loss=loss, agreement=agreement, staleness=2.5
        )
        decision = rail.decide(facts, memory)
        assert decision.reason
        assert decision.level == decision.memory.level or mode == "sync" or not config.enabled
        if decision.level != memory.level:
            changes.append((number, decision.level))
        memory = decision.memory
    return changes, decision


# losses, and the changes of level: a look's number and the level from then on
STORIES: dict[str, tuple[list[float | None], list[tuple[int, int]]]] = {
    "nothing logged": ([None] * 50, []),
    "noise": (FLAT * 3, []),
    "a fall": ([2.0 * 0.9**look + 0.1 for look in range(80)], []),
    "one wild look": ([*FLAT, 50.0, *FLAT], []),
    # five looks make the median, which passes the bound with the third of them, and must be there twice
    "a rise": ([*FLAT, *[1.2] * 20], [(23, 1), (28, 2), (33, 3)]),
    "too little of a rise": ([*FLAT, *[1.08] * 20], []),
    # before `hold_steps` steps and five looks nothing is a drift
    "a rise at the start": ([1.0 + 0.1 * look for look in range(7)], [(5, 1)]),
    "an explosion": ([*FLAT, 2.5, 9.0, 30.0], [(21, 3)]),
    "an explosion from the start": ([1.0, 20.0, 400.0, 8000.0], [(2, 3)]),
    "no explosion at the start": ([1.0, 9.0, 9.0, 2.0, 1.0, 1.0, 1.0], []),
    "an explosion at level 1": ([*FLAT, *[1.2] * 4, 9.0, 40.0], [(23, 1), (25, 3)]),
    "not finite": ([*FLAT, math.inf], [(20, 3)]),
    "not a number, and never again one": ([1.0, *[math.nan] * 60], [(1, 3)]),
    # back at the old loss, as the median sees with the third such look: a level down after five more each, for good
    "cured": ([*FLAT, *[1.2] * 4, *FLAT, *FLAT], [(23, 1), (30, 0)]),
    # calm is within half of the bound
    "hardly cured": ([*FLAT, *[1.2] * 4, *[1.07] * 12], [(23, 1)]),
    "cured by sync": ([*FLAT, 2.5, 9.0, *FLAT, *FLAT], [(21, 3), (26, 2), (31, 1), (36, 0)]),
    "a new best": ([*FLAT, 2.5, 9.0, *[0.9 - 0.01 * k for k in range(20)]], [(21, 3), (26, 2), (31, 1), (36, 0)]),
    # sync does not help in 4 x 50 steps: what is, is
    "another task": ([*FLAT, *[5.0, 5.01] * 40], [(21, 3), (46, 2), (51, 1), (56, 0)]),
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_stories(name: str) -> None:
    losses, expected = STORIES[name]
    changes, _ = looks(losses)
    assert changes == expected


def test_a_level_that_was_left_too_early_is_held_twice_as_long() -> None:
    bad, good = [1.2] * 4, [1.0, 1.01] * 4
    changes, decision = looks([*FLAT, *bad, *good, *bad, *good, *good, *good])
    ups = [number for number, level in changes if level == 1]
    downs = [number for number, level in changes if level == 0]
    assert [level for _, level in changes] == [1, 0, 1, 0]
    assert downs[1] - ups[1] == downs[0] - ups[0] + 5
    assert decision.memory.num_relapses == 1


@pytest.mark.parametrize("value", [-1.0, 0.0, 1e-9])
def test_a_loss_about_zero_or_below_is_judged_by_its_fall(value: float) -> None:
    """The fall so far is 2, so a rise of a hundredth of that is a drift; less is none."""
    fall = [value + 2.0 * 0.8**look for look in range(90)]
    small = 0.05 * 0.1 * 2.0 * 0.9 if value > -0.05 else 0.09 * abs(value)
    assert looks([*fall, *[value + small] * 12])[0] == []
    assert [level for _, level in looks([*fall, *[value + 2.0 * small] * 12])[0]] == [1, 2]


def test_agreement_alone_is_enough() -> None:
    agreements = [0.3] * 8 + [-0.9] * 20
    changes, decision = looks([None] * 28, agreements=agreements)
    # smoothed: -0.3, -0.6, ...; two looks below -0.2 lift the level, and again when it was held
    assert changes == [(9, 1), (14, 2), (19, 3)]
    assert decision.reason == "agreement -0.90, bound -0.2"
    back = [*agreements[:12], *[0.5] * 20]
    assert looks([None] * len(back), agreements=back)[0] == [(9, 1), (16, 0)]
    assert looks([None] * 28, agreements=agreements, config=dataclasses.replace(CONFIG, min_agreement=-1.0))[0] == []


def test_looks_without_a_comparison_say_nothing_of_agreement() -> None:
    agreements: list[float | None] = [0.3] * 8 + [-0.9, *[None] * 10, -0.9, *[None] * 10]
    assert looks([None] * len(agreements), agreements=agreements)[0] == [(19, 1), (24, 0)]


@pytest.mark.parametrize(
    ("config", "mode", "num_groups"),
    [(dataclasses.replace(CONFIG, enabled=False), "async", 4), (CONFIG, "sync", 4), (CONFIG, "hybrid", 1)],
)
def test_where_it_does_nothing(config: GuardConfig, mode: str, num_groups: int) -> None:
    losses = [*FLAT, 100.0, 1e9, math.inf]
    assert looks(losses, config=config, mode=mode, num_groups=num_groups)[0] == []


def test_reasons_tell_the_numbers() -> None:
    _, decision = looks([*FLAT, *[1.2] * 4])
    assert decision.reason == "loss 1.2, best 1 and bound 0.1 above it; staleness 2.5, late 0%"
    _, decision = looks([*FLAT, *[1.2] * 3], agreements=[0.25] * 23)
    assert decision.reason == "loss 1.2, best 1 and bound 0.1 above it"
    _, decision = looks([*FLAT, 9.0, 9.0])
    assert decision.reason.startswith("loss 9 of the last look, best 1;"), "the median still is where it was"
    _, decision = looks([*FLAT, math.nan])
    assert decision.reason == "the loss is nan; staleness 2.5, late 0%"
    _, decision = looks([*FLAT], agreements=[0.25] * 20)
    assert decision.reason == "calm, loss 1.01, best 1, agreement 0.25"
    _, decision = looks(STORIES["cured"][0][:31])
    assert decision.reason == "calm for 50 steps, loss 1, best 1"
    _, decision = looks(STORIES["another task"][0][:42])
    assert decision.reason.endswith("sync did not cure it in 200 steps: 5.01 is now what to compare with")


def test_an_agreement_beyond_a_cosine_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot judge a run: got agreement 1.5, need a cosine of -1 to 1"):
        GuardFacts(mode="async", num_groups=2, step=1, agreement=1.5)
