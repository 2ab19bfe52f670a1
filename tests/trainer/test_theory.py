"""The statements of docs/theory.md, each checked numerically; the numbers are those of its headings."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

Array = npt.NDArray[np.float64]

K, M, N = 4, 3, 5
"""Tiers, islands, dimensions."""


class Quadratics:
    """f_k(θ) = ½ (θ − c_k)ᵀ A_k (θ − c_k)."""

    def __init__(self, seed: int, *, one_curvature: bool = False) -> None:
        rng = np.random.default_rng(seed)
        roots = rng.normal(size=(1 if one_curvature else K, N, N))
        self.curvatures: Array = np.broadcast_to(roots @ roots.transpose(0, 2, 1) / N + np.eye(N) / 4, (K, N, N))
        self.centres: Array = rng.normal(size=(K, N))
        self.start: Array = rng.normal(size=N)
        self.mixes: Array = rng.dirichlet(np.ones(K), size=M)
        self.weights: Array = rng.dirichlet(np.ones(M))

    @property
    def mean_mix(self) -> Array:
        mean: Array = self.weights @ self.mixes
        return mean

    def gradients(self, theta: Array) -> Array:
        """Of every tier."""
        found: Array = np.einsum("kab,kb->ka", self.curvatures, theta - self.centres)
        return found

    def inner(self, mix: Array, *, lr: float, steps: int) -> Array:
        theta = self.start
        for _ in range(steps):
            theta = theta - lr * mix @ self.gradients(theta)
        return theta

    def merged(self, mixes: Array, *, lr: float, steps: int) -> Array:
        found: Array = self.weights @ np.stack([self.inner(mix, lr=lr, steps=steps) for mix in mixes])
        return found

    def difference(self, *, lr: float, steps: int) -> Array:
        """The merged parameters of islands on their mixes, less those of islands on the mean mix."""
        return self.merged(self.mixes, lr=lr, steps=steps) - self.inner(self.mean_mix, lr=lr, steps=steps)

    def covariance_term(self) -> Array:
        """Σ w_i δA_i δg_i."""
        apart = self.mixes - self.mean_mix
        found: Array = np.einsum(
            "i,ik,kab,il,lb->a", self.weights, apart, self.curvatures, apart, self.gradients(self.start)
        )
        return found


def test_1_with_one_curvature_only_the_mean_mix_counts() -> None:
    problem = Quadratics(0, one_curvature=True)
    for steps in (1, 7, 40):
        assert np.abs(problem.difference(lr=0.1, steps=steps)).max() < 1e-12
    assert np.abs(Quadratics(0).difference(lr=0.1, steps=7)).max() > 1e-3


def test_2_with_different_curvatures_a_covariance_decides() -> None:
    problem = Quadratics(1)
    assert np.abs(problem.difference(lr=0.1, steps=1)).max() < 1e-14
    steps = 6
    errors = []
    for lr in (1e-2, 5e-3, 2.5e-3):
        predicted = lr**2 * steps * (steps - 1) / 2 * problem.covariance_term()
        errors.append(float(np.abs(problem.difference(lr=lr, steps=steps) - predicted).max()))
        assert errors[-1] < 0.2 * np.abs(predicted).max()
    # The rest is of third order: half the step, an eighth of it.
    assert errors[0] / errors[1] == pytest.approx(8, rel=0.15)
    assert errors[1] / errors[2] == pytest.approx(8, rel=0.1)


def test_2_different_mixes_win_as_often_as_they_lose_and_the_sign_tells() -> None:
    rng = np.random.default_rng(2)
    won = []
    for seed in range(200):
        problem = Quadratics(seed)
        slope = rng.normal(size=N)  # ∇F of a linear holdout loss
        gained = float(slope @ problem.difference(lr=1e-3, steps=8))
        assert np.sign(gained) == np.sign(slope @ problem.covariance_term())
        won.append(gained < 0)
    assert 0.35 < np.mean(won) < 0.65


def test_3_noise_of_drawing_tiers_falls_by_the_covariance_of_the_islands_gradients() -> None:
    problem = Quadratics(3)
    gradients = problem.gradients(problem.start)

    def noise(mix: Array) -> Array:
        mean = mix @ gradients
        found: Array = (gradients.T * mix) @ gradients - np.outer(mean, mean)
        return found

    apart = (problem.mixes - problem.mean_mix) @ gradients
    between = (apart.T * problem.weights) @ apart
    within = sum(w * noise(mix) for w, mix in zip(problem.weights, problem.mixes, strict=True))
    np.testing.assert_allclose(within, noise(problem.mean_mix) - between, atol=1e-12)
    drawn = np.random.default_rng(0).choice(K, size=200_000, p=problem.mixes[0])
    np.testing.assert_allclose(np.cov(gradients[drawn].T), noise(problem.mixes[0]), atol=0.05)


def _design(mixes: Array) -> Array:
    return mixes - mixes.mean(axis=0)


def test_4_contrasts_are_known_as_well_as_the_design_says() -> None:
    rng = np.random.default_rng(4)
    worth, noise = rng.normal(size=K), 0.3
    mixes = rng.dirichlet(np.ones(K), size=12)
    design = _design(mixes)
    assert np.linalg.matrix_rank(design) == K - 1
    contrast = np.array([1.0, -1.0, 0.0, 0.0])
    told = mixes @ worth + noise * rng.normal(size=(20_000, len(mixes)))
    estimates = (told - told.mean(axis=1, keepdims=True)) @ np.linalg.pinv(design).T @ contrast
    assert estimates.mean() == pytest.approx(contrast @ worth, abs=0.02)
    expected = noise**2 * contrast @ np.linalg.pinv(design.T @ design) @ contrast
    assert estimates.var() == pytest.approx(expected, rel=0.05)


def test_4_one_mix_teaches_no_contrast_and_fewer_islands_than_tiers_not_all() -> None:
    rng = np.random.default_rng(5)
    assert np.allclose(_design(np.tile(rng.dirichlet(np.ones(K)), (6, 1))), 0)
    few = np.tile(rng.dirichlet(np.ones(K), size=K - 1), (5, 1))  # five cycles on mixes that are held still
    assert np.linalg.matrix_rank(_design(few)) == K - 2


@pytest.mark.parametrize("kept", [0.0, 0.4])
def test_4_leads_tell_what_tiers_are_worth_and_their_changes_dont(kept: float) -> None:
    rng = np.random.default_rng(7)
    worth, noise, cycles = rng.normal(size=K), 0.3, 60
    design = _design(rng.dirichlet(np.ones(K), size=8))
    lead = np.zeros((20_000, len(design)))
    for _ in range(cycles):
        before, lead = lead, kept * lead + design @ worth + noise * rng.normal(size=lead.shape)
    inverse = np.linalg.pinv(design).T
    along = worth - worth.mean()
    assert (lead @ inverse).mean(axis=0) == pytest.approx(along / (1 - kept), abs=0.02)
    changes = lead - before
    assert (changes @ inverse).mean(axis=0) == pytest.approx(np.zeros(K), abs=0.03)
    assert changes.var(axis=0).mean() == pytest.approx(2 * noise**2 / (1 + kept), rel=0.05)


@pytest.mark.parametrize(("noise", "wins"), [(0.05, True), (3.0, False)])
def test_4_moving_by_the_estimate_gains_what_is_said_and_loses_where_noise_is_above_the_signal(
    noise: float, wins: bool
) -> None:
    rng = np.random.default_rng(6)
    worth, trade = rng.normal(size=K), 4.0
    along = worth - worth.mean()
    mixes = rng.dirichlet(np.ones(K), size=8)
    design = _design(mixes)
    told = mixes @ worth + noise * rng.normal(size=(40_000, len(mixes)))
    estimates = (told - told.mean(axis=1, keepdims=True)) @ np.linalg.pinv(design).T
    steps = estimates / trade
    gains = steps @ worth - trade / 2 * (steps**2).sum(axis=1)
    expected = (along @ along - noise**2 * np.trace(np.linalg.pinv(design.T @ design))) / (2 * trade)
    assert gains.mean() == pytest.approx(expected, rel=0.05)
    assert bool(gains.mean() > 0) is wins


def test_5_divergence_is_the_trace_of_the_designs_covariance() -> None:
    rng = np.random.default_rng(7)
    centre, weights = rng.dirichlet(3 * np.ones(K)), rng.dirichlet(np.ones(M))
    directions = rng.normal(size=(M, K))
    directions -= directions.mean(axis=1, keepdims=True)
    directions -= weights @ directions
    errors = []
    for size in (1e-2, 5e-3):
        mixes = centre + size * directions
        divergence = float(weights @ (mixes * np.log(mixes / (weights @ mixes))).sum(axis=1))
        trace = 0.5 * float(((weights @ (mixes - centre) ** 2) / centre).sum())
        errors.append(abs(divergence - trace))
        assert divergence == pytest.approx(trace, rel=0.2)
    assert errors[0] / errors[1] == pytest.approx(8, rel=0.3)
    line = centre + np.outer([-1e-2, 0.0, 1e-2], directions[0])
    assert np.linalg.matrix_rank(_design(line), tol=1e-9) == 1  # a divergence above 0, and two contrasts unknown


def test_6_merging_gains_half_the_spread_in_a_valley_and_the_mixes_bound_the_spread() -> None:
    problem = Quadratics(8)
    ends = np.stack([problem.inner(mix, lr=0.05, steps=10) for mix in problem.mixes])
    mean = problem.weights @ ends
    hessian, centre = problem.curvatures[0], problem.centres[0]

    def holdout(theta: Array) -> float:
        return float((theta - centre) @ hessian @ (theta - centre)) / 2

    spread = ((ends - mean).T * problem.weights) @ (ends - mean)
    apart = float(problem.weights @ np.array([holdout(end) for end in ends]))
    assert holdout(mean) == pytest.approx(apart - np.trace(hessian @ spread) / 2)

    gradients, lr, steps = problem.gradients(problem.start), 0.05, 10  # constant along the way
    straight = problem.start - lr * steps * problem.mixes @ gradients
    off = straight - problem.weights @ straight
    largest = np.linalg.norm(gradients, axis=1).max()
    distances = np.abs(problem.mixes - problem.mean_mix).sum(axis=1)
    bound = (lr * steps * largest) ** 2 * float(problem.weights @ distances**2)
    assert float(problem.weights @ (off**2).sum(axis=1)) <= bound
