"""The linear law behind the predictor."""

import random

import pytest

from pdserve.predictor.linear_fit import LinearFit


def make_fit(num_terms: int = 3) -> LinearFit:
    return LinearFit(num_terms, min_samples=8, half_life_samples=200)


def test_a_law_is_found_from_exact_samples() -> None:
    fit = make_fit()
    rng = random.Random(1)
    for _ in range(50):
        terms = (1.0, rng.uniform(1, 1e4), rng.uniform(1, 1e8))
        fit.observe(terms, 0.01 + 2e-5 * terms[1] + 3e-10 * terms[2])
    assert fit.coefficients == pytest.approx((0.01, 2e-5, 3e-10), rel=1e-4)


def test_no_coefficient_is_below_zero_where_least_squares_would_go_there() -> None:
    fit = make_fit(2)
    for x in (1.0, 2.0, 3.0, 4.0) * 5:
        fit.observe((1.0, x), 5.0 - 0.5 * x)
    assert min(fit.coefficients) >= 0
    assert fit.predict((1.0, 100.0)) > 0


def test_terms_that_never_vary_do_not_spoil_the_law() -> None:
    fit = make_fit()
    for _ in range(20):
        fit.observe((1.0, 1.0, 512.0), 0.004)
    assert fit.predict((1.0, 1.0, 512.0)) == pytest.approx(0.004)


def test_small_and_large_values_count_alike() -> None:
    fit = make_fit(2)
    for _ in range(20):
        fit.observe((1.0, 1.0), 0.001)
        fit.observe((1.0, 1e6), 10.0)
    assert fit.predict((1.0, 1.0)) == pytest.approx(0.001, rel=0.05)
    assert fit.predict((1.0, 1e6)) == pytest.approx(10.0, rel=0.05)


def test_a_law_that_changes_is_followed() -> None:
    fit = LinearFit(2, min_samples=8, half_life_samples=20)
    for factor in (1.0, 2.0):
        for x in range(1, 201):
            fit.observe((1.0, x), factor * 0.1 * x)
    assert fit.predict((1.0, 50.0)) == pytest.approx(10.0, rel=0.02)


def test_one_stall_hardly_moves_a_fitted_law() -> None:
    fit = make_fit(2)
    for x in list(range(1, 21)) * 5:
        fit.observe((1.0, x), 0.1 * x)
    fit.observe((1.0, 10.0), 60.0)
    assert fit.predict((1.0, 10.0)) == pytest.approx(1.0, rel=0.05)


def test_the_error_is_that_of_predictions_made_before_the_sample() -> None:
    fit = make_fit(2)
    for x in range(1, 60):
        fit.observe((1.0, x), 0.1 * x)
    assert fit.mean_error < 0.01
    for x in range(1, 60):
        fit.observe((1.0, x), 0.125 * x)
    assert fit.mean_error > 0.02


def test_nothing_is_fitted_before_enough_samples_came() -> None:
    fit = make_fit(2)
    for _ in range(7):
        fit.observe((1.0, 1.0), 1.0)
    assert not fit.is_fitted
    fit.observe((1.0, 1.0), 1.0)
    assert fit.is_fitted
