"""Damping: taking suspect contributions away from a global state, as far as the holdout loss bears it. No gradient step.

Two directions are tried. `subtracted`: the outer steps that the suspect outer gradients were, taken plainly. `remade`: all outer steps since the first suspect one
made again with the others' outer gradients only, momentum and all. How far to go along either is a line search on the holdout loss: to go the whole way does harm
more often than not, and to stay where one is is one of the choices, so that damping is never worse on the holdout than leaving things alone. Where a branch starts is remedies.py's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from manifests.errors import Failure, ObjectMissing
from trainer.outer import Part
from trainer.quantise import Tensors
from trainer.rollback import Contribution
from trainer.run import Run
from trainer.tape import Anatomy, GlobalState, merge_into, move, read_merge, read_outer_gradient, replay

FACTORS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25)
"""Tried along each direction; then the middles to the left and right of the best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Damping:
    """How far which direction is gone."""

    direction: str
    """subtracted, remade, or none."""
    factor: float
    before: float
    """Holdout loss, nats per token."""
    after: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Directions:
    """What can be taken away from the global parameters, by name of the direction."""

    state: GlobalState
    """As it stands."""
    steps: dict[str, Tensors]
    momentum: Tensors
    """That the outer optimizer would have without the suspects."""


def find_directions(run: Run, anatomy: Anatomy, *, end: int, contributions: Sequence[Contribution]) -> Directions:
    """Makes the run's merges again, with and without the suspect contributions. Those that a parent of the run has merged stay.

    Args:
        run: the run.
        anatomy: how its model is cut.
        end: its merge whose state is to be damped.
        contributions: the suspects; the one with the largest share counts whole, others by theirs.

    Raises:
        Failure: a merge or an outer gradient is gone or damaged; the message names it.
    """
    inherited = run.branch.merge if run.branch is not None else 0
    largest = max((c.share for c in contributions), default=1.0)
    guilt = {(c.merge, c.island): c.share / largest for c in contributions if inherited < c.merge <= end}
    first = min((merge for merge, _ in guilt), default=end + 1)
    state = replay(run, anatomy, end=first - 1)
    without = copy.deepcopy(state)
    subtracted: Tensors = {}
    for merge in range(first, end + 1):
        try:
            _, description = read_merge(run, anatomy, merge)
            gradients = [read_outer_gradient(run, anatomy, said) for said in description["contributions"]]
        except ObjectMissing as e:
            raise Failure(
                f"merge {merge} of run {run.name} can't be made again: {e}; restore it, or take another plan"
            ) from e
        weights = [float(said["weight"]) for said in description["contributions"]]
        shares = [guilt.get((merge, said["island"]), 0.0) for said in description["contributions"]]
        part = Part(**description["part"])
        lr, total = run.config.outer_lr * part.islands, sum(weights)
        for gradient, weight, share in zip(gradients, weights, shares, strict=True):
            if share > 0:
                for name, value in gradient.items():
                    taken = lr * share * weight / total * value
                    subtracted[name] = subtracted[name] - taken if name in subtracted else -taken
        number = description["fragment"]
        outer, _ = merge_into(run, anatomy, state.fragments[number], gradients, weights, part)
        move(state, description, outer)
        left = [i for i, share in enumerate(shares) if share < 1.0]
        outer, _ = merge_into(
            run,
            anatomy,
            without.fragments[number],
            [gradients[i] for i in left],
            [weights[i] * (1 - shares[i]) for i in left],
            part,
        )
        move(without, description, outer)
    now, then = state.parameters(), without.parameters()
    return Directions(
        state=state,
        steps={"subtracted": subtracted, "remade": {name: now[name] - then[name] for name in now}},
        momentum={name: value for fragment in without.fragments for name, value in fragment.outer.momentum.items()},
    )


def search(directions: Directions, loss_of: Callable[[Tensors], float]) -> Damping:
    """The direction and the factor with the least holdout loss.

    Args:
        directions: what can be taken away.
        loss_of: holdout loss of global parameters.
    """
    parameters = directions.state.parameters()
    before = loss_of(parameters)
    best = Damping(direction="none", factor=0.0, before=before, after=before)
    for direction, step in directions.steps.items():
        if not step:
            continue
        found = {0.0: before}

        def try_factor(factor: float, step: Tensors = step, found: dict[float, float] = found) -> None:
            found[factor] = loss_of(_less(parameters, step, factor))

        for factor in FACTORS:
            try_factor(factor)
        middle = min(found, key=lambda factor: found[factor])
        around = [x for x in sorted(found) if x != middle]
        for neighbour in [*[x for x in around if x < middle][-1:], *[x for x in around if x > middle][:1]]:
            try_factor((middle + neighbour) / 2)
        factor = min(found, key=lambda factor: found[factor])
        if found[factor] < best.after:
            best = Damping(direction=direction, factor=factor, before=before, after=found[factor])
    return best


def damped(directions: Directions, damping: Damping) -> GlobalState:
    """The state after it: every fragment that has changed is of a new version, so that islands take it."""
    state = copy.deepcopy(directions.state)
    step = directions.steps.get(damping.direction, {})
    for fragment in state.fragments:
        outer = fragment.outer
        if not any(name in step for name in outer.parameters):
            continue
        momentum = outer.momentum
        if damping.direction == "remade":
            share = min(1.0, damping.factor)
            momentum = {name: (1 - share) * m + share * directions.momentum[name] for name, m in momentum.items()}
        fragment.outer = replace(outer, parameters=_less(outer.parameters, step, damping.factor), momentum=momentum)
        fragment.version += 1
    return state


def _less(parameters: Tensors, step: Tensors, factor: float) -> Tensors:
    return {name: value - factor * step[name] if name in step else value for name, value in parameters.items()}
