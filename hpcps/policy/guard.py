"""When a run with several groups slides towards sync, and when it goes back. Pure: it takes no step itself.

Level 0 leaves groups free, 1 and 2 make them wait for each other more and more, 3 is sync. Who carries a level out is
said in ``protocol.guard``.

- **Drift.** The loss of a look is the mean since the look before; its median over five looks is compared with the best
  such median. Above it by ``guard.loss_rise_frac`` and by more than noise explains, two looks in a row, is a drift: one
  level up. Noise is judged, while nothing is wrong, by how far a look lies off the line through the two before it.
- **Explosion.** A loss that leaves its best by ten times as much, two looks in a row, goes to sync at once, and so does
  one that is not finite.
- **Agreement.** A mean cosine of the groups' gradients that stays below ``guard.min_agreement`` is a drift as well.
- **Back.** One level down after ``guard.hold_steps`` steps in which the loss stayed within half of the bound. Each time
  that this turned out too early, the next wait is twice as long.
- **Not its business.** What sync does not cure in four such waits, and does not even better, is no fault of asynchrony:
  the present loss is then the one to compare with.

Changes that the loss makes by itself in the first looks are none: a drift needs five of them, and ``guard.hold_steps``
steps. While the loss falls it is its own best.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass

from hpcps.config import GuardConfig
from hpcps.errors import PlanError

__all__ = ["TOP_LEVEL", "GuardDecision", "GuardFacts", "GuardMemory", "GuardRail"]

TOP_LEVEL = 3
"""Sync."""

SMOOTH_LOOKS = 5
"""Looks that the median of the loss is taken over, and that are needed before a drift is believed."""

NOISE_LOOKS = 32
"""Looks that the noise is averaged over: its estimate is then good to a tenth."""

SIGMA = 0.512
"""Standard deviation of normal noise over its mean absolute second difference, sqrt(pi / 12). A fall has none."""

UNSURE = 4.0
"""The noise counts as more by this over the number of second differences: few of them may be small by chance."""

CLIPPED = 4.0
"""A difference counts as at most so many of the mean ones: an outlier is no noise."""

NOISE_SIGMAS = 6.0
"""The best of a thousand medians of five looks lies 1.7 standard deviations of a look below their mean, the worst as
much above it; the rest is for the estimate and for noise that is not normal."""

EXPLODED = 10.0
"""An explosion is so many times what a drift is; at the default of ``guard.loss_rise_frac`` the loss has doubled."""

EXPLODED_SIGMAS = 10.0
"""And so many standard deviations of one look."""

FIRST_EXPLODED = 100.0
"""In the first looks, which tell little of the noise, it is so many drifts: eleven times the best by default."""

FIRST_LOOKS = 8
"""Looks that are the first ones."""

IN_A_ROW = 2
"""Looks that must agree."""

FALL_FRAC = 0.05
"""A rise is also compared with this part of the fall so far, for a loss near 0 or below it."""

AGREEMENT_PART = 0.5
"""Weight of a new look in the smoothed agreement."""

MOST_RELAPSES = 4
"""Longest wait before going back: 2 to this power times ``guard.hold_steps``."""

GIVE_UP_HOLDS = 4
"""Waits at the top level after which the loss is taken as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardFacts:
    """One look at a run.

    Args:
        mode: ``sync``, ``async`` or ``hybrid``.
        num_groups: groups that the run has where nothing holds them together.
        step: steps of the run so far, not falling.
        loss: mean since the last look, weighted by samples; may be infinite or not a number; None: none was logged.
        agreement: mean cosine of the groups' gradients since the last look, -1 to 1; None: none were compared.
        staleness: mean of pushes, in versions.
        late_frac: part of the pushes that missed the window of their own step.
    """

    mode: str
    num_groups: int
    step: int
    loss: float | None = None
    agreement: float | None = None
    staleness: float = 0.0
    late_frac: float = 0.0

    def __post_init__(self) -> None:
        if self.agreement is not None and not -1.001 <= self.agreement <= 1.001:
            raise PlanError(
                f"cannot judge a run: got agreement {self.agreement}, need a cosine of -1 to 1; correct the measurement"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardMemory:
    """What one look leaves for the next. The default is that of the start.

    Args:
        level: in force.
        losses: of the last looks that had a finite one, oldest first.
        num_looks: looks that had one.
        first: the first of all, or the one that counts as such.
        best: lowest median so far.
        change: mean absolute second difference of the loss from look to look while nothing was wrong.
        agreement: smoothed; None: nothing was compared at this level.
        num_over: looks in a row with a drift.
        num_exploded: looks in a row with an explosion.
        num_low: looks in a row with too little agreement.
        changed_step: step of the last change of level.
        uneasy_step: last step at which the loss or the agreement was not calm.
        num_relapses: times that a level had to be taken again.
        went_back: a level was left since the last slide.
    """

    level: int = 0
    losses: tuple[float, ...] = ()
    num_looks: int = 0
    first: float = 0.0
    best: float = math.inf
    change: float = 0.0
    agreement: float | None = None
    num_over: int = 0
    num_exploded: int = 0
    num_low: int = 0
    changed_step: int = 0
    uneasy_step: int = 0
    num_relapses: int = 0
    went_back: bool = False

    @property
    def smooth(self) -> float:
        """The median of the last looks."""
        return statistics.median(self.losses)

    def bounds(self, config: GuardConfig) -> tuple[float, float]:
        """How much above its best the smoothed loss may be, and a single look's."""
        rise = config.loss_rise_frac * max(abs(self.best), FALL_FRAC * (self.first - self.best))
        sigma = SIGMA * self.change * (1 + UNSURE / max(1, self.num_looks - 2))
        explosion = max(EXPLODED * rise, EXPLODED_SIGMAS * sigma)
        if self.num_looks < FIRST_LOOKS:
            explosion = FIRST_EXPLODED * rise
        return max(rise, NOISE_SIGMAS * sigma), explosion


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardDecision:
    """The level from now on, what to remember, and why."""

    level: int
    memory: GuardMemory
    reason: str


class GuardRail:
    """Slide towards sync while loss or gradients drift apart, and back."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config

    def decide(self, facts: GuardFacts, memory: GuardMemory) -> GuardDecision:
        """Judge one look; a level is kept unless the reason says otherwise."""
        if not self._config.enabled or facts.mode == "sync":
            return GuardDecision(level=0, memory=memory, reason="off, or sync anyway")
        finite = facts.loss is None or math.isfinite(facts.loss)
        memory = self._with_agreement(facts, memory)
        if facts.loss is not None and finite:
            memory = self._with_loss(facts.loss, memory)
        if facts.num_groups < 2 and memory.level == 0:
            return GuardDecision(level=0, memory=memory, reason="one group is sync already")
        if not finite:
            memory = dataclasses.replace(memory, uneasy_step=facts.step)
            return self._slide(facts, memory, TOP_LEVEL, f"the loss is {facts.loss}")
        calm, trouble, level = self._judge(facts, memory)
        if level > memory.level:
            return self._slide(facts, memory, level, trouble)
        if not calm:
            memory = dataclasses.replace(memory, uneasy_step=facts.step)
            return self._give_up(facts, memory, trouble)
        wait_steps = self._config.hold_steps << memory.num_relapses
        if memory.level > 0 and facts.step - max(memory.changed_step, memory.uneasy_step) >= wait_steps:
            return self._change(facts, memory, memory.level - 1, f"calm for {wait_steps} steps{self._shown(memory)}")
        return GuardDecision(level=memory.level, memory=memory, reason=f"calm{self._shown(memory)}")

    # --- what is seen ----------------------------------------------------------------------------------

    def _with_loss(self, loss: float, memory: GuardMemory) -> GuardMemory:
        """Compare a look with what was best before it; then it may be the best itself."""
        losses, num_looks = (*memory.losses, loss)[-SMOOTH_LOOKS:], memory.num_looks + 1
        smooth = statistics.median(losses)
        bound, explosion = memory.bounds(self._config)
        over = num_looks >= SMOOTH_LOOKS and smooth - memory.best > bound
        exploded = num_looks > 1 and loss - memory.best > explosion
        change = memory.change
        if num_looks > 2 and not (over or exploded):
            most = CLIPPED * change if change > 0 and num_looks > FIRST_LOOKS else math.inf
            clipped = min(abs(loss - 2 * losses[-2] + losses[-3]), most)
            change += (clipped - change) / min(num_looks - 2, NOISE_LOOKS)
        return dataclasses.replace(
            memory,
            losses=losses,
            num_looks=num_looks,
            first=memory.first if memory.num_looks else loss,
            best=min(memory.best, smooth),
            change=change,
            num_over=memory.num_over + 1 if over else 0,
            num_exploded=memory.num_exploded + 1 if exploded else 0,
        )

    def _with_agreement(self, facts: GuardFacts, memory: GuardMemory) -> GuardMemory:
        if facts.agreement is None:
            return memory
        smooth = facts.agreement
        if memory.agreement is not None:
            smooth = AGREEMENT_PART * facts.agreement + (1 - AGREEMENT_PART) * memory.agreement
        low = smooth < self._config.min_agreement
        return dataclasses.replace(memory, agreement=smooth, num_low=memory.num_low + 1 if low else 0)

    # --- what follows ----------------------------------------------------------------------------------

    def _judge(self, facts: GuardFacts, memory: GuardMemory) -> tuple[bool, str, int]:
        """Whether all is calm, what is not, and the level that it asks for."""
        config = self._config
        troubles = []
        bound, _ = memory.bounds(config)
        if memory.losses and memory.smooth - memory.best > bound / 2:
            troubles.append(f"loss {memory.smooth:.4g}, best {memory.best:.4g} and bound {bound:.4g} above it")
        if memory.num_low:
            troubles.append(f"agreement {memory.agreement:.2f}, bound {config.min_agreement:g}")
        if memory.num_exploded:
            troubles.append(f"loss {memory.losses[-1]:.4g} of the last look, best {memory.best:.4g}")
        trouble = ", ".join(troubles)
        if memory.num_exploded >= IN_A_ROW:
            return False, trouble, TOP_LEVEL
        drifts = max(memory.num_over, memory.num_low) >= IN_A_ROW
        held = facts.step - memory.changed_step < config.hold_steps
        return not troubles, trouble, min(memory.level + 1, TOP_LEVEL) if drifts and not held else memory.level

    def _slide(self, facts: GuardFacts, memory: GuardMemory, level: int, trouble: str) -> GuardDecision:
        """Up, and the next way back takes longer if the last one was too early."""
        if level == memory.level:
            return GuardDecision(level=level, memory=memory, reason=trouble)
        relapses = min(MOST_RELAPSES, memory.num_relapses + memory.went_back)
        memory = dataclasses.replace(memory, num_relapses=relapses, went_back=False, uneasy_step=facts.step)
        seen = f"{trouble}; staleness {facts.staleness:.1f}, late {facts.late_frac:.0%}"
        return self._change(facts, memory, level, seen)

    def _change(self, facts: GuardFacts, memory: GuardMemory, level: int, reason: str) -> GuardDecision:
        memory = dataclasses.replace(
            memory,
            level=level,
            agreement=None,
            num_over=0,
            num_exploded=0,
            num_low=0,
            changed_step=facts.step,
            went_back=memory.went_back or level < memory.level,
        )
        return GuardDecision(level=level, memory=memory, reason=reason)

    def _give_up(self, facts: GuardFacts, memory: GuardMemory, trouble: str) -> GuardDecision:
        """Stay; after long at the top with a loss that falls no more, that loss is the one to compare with."""
        wait_steps = GIVE_UP_HOLDS * (self._config.hold_steps << memory.num_relapses)
        falls = not memory.losses or memory.losses[-1] == min(memory.losses)
        if memory.level == TOP_LEVEL and facts.step - memory.changed_step >= wait_steps and not falls:
            best = memory.smooth
            memory = dataclasses.replace(memory, best=best, first=best, num_over=0, num_exploded=0)
            trouble = f"{trouble}; sync did not cure it in {wait_steps} steps: {best:.4g} is now what to compare with"
        return GuardDecision(level=memory.level, memory=memory, reason=trouble)

    def _shown(self, memory: GuardMemory) -> str:
        """Loss and agreement for the reason, as far as they are known."""
        loss = f", loss {memory.smooth:.4g}, best {memory.best:.4g}" if memory.losses else ""
        return loss if memory.agreement is None else f"{loss}, agreement {memory.agreement:.2f}"
