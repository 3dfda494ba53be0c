"""Temperature scaling from sums, against the same by hand and by scipy."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from uefl.core.metrics import NLL_BY_TEMPERATURE, compute_scaled_nll
from uefl.core.temperature import (
    NUM_TEMPERATURES,
    TEMPERATURES,
    fit_temperature,
    scale_nll,
    scale_probabilities,
    sum_nll_by_temperature,
)


def make_overconfident(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return probabilities that are twice too sharp, and labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    y = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    return (2 * logits).softmax(-1), y


def test_the_middle_of_the_grid_changes_nothing() -> None:
    p, y = make_overconfident(50, 0)
    assert TEMPERATURES[NUM_TEMPERATURES // 2] == pytest.approx(1)
    middle = sum_nll_by_temperature(p, y)[NUM_TEMPERATURES // 2]
    assert float(middle) == pytest.approx(float(-p[torch.arange(50), y].log().sum()))


def test_sums_of_two_batches_are_those_of_all_examples() -> None:
    p, y = make_overconfident(50, 1)
    halves = sum_nll_by_temperature(p[:20], y[:20]) + sum_nll_by_temperature(p[20:], y[20:])
    torch.testing.assert_close(halves, sum_nll_by_temperature(p, y))


def test_the_temperature_is_that_of_a_search_and_lowers_the_nll_of_other_examples() -> None:
    (p, y), (p_test, y_test) = make_overconfident(4000, 2), make_overconfident(4000, 3)

    def compute_nll(temperature: float) -> float:
        scaled = (p.log() / temperature).softmax(-1)
        return float(-scaled[torch.arange(len(y)), y].log().sum())

    exact = minimize_scalar(compute_nll, bounds=(0.25, 4), method="bounded").x
    test_sums = sum_nll_by_temperature(p_test, y_test)
    temperature, nll = scale_nll(sum_nll_by_temperature(p, y), test_sums, len(y_test))
    assert exact / 1.09 < temperature < exact * 1.09
    assert temperature == pytest.approx(2, rel=0.15)
    assert nll < float(test_sums[NUM_TEMPERATURES // 2]) / len(y_test) - 0.05


def test_labels_of_probability_zero_have_a_finite_nll() -> None:
    sums = sum_nll_by_temperature(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    assert sums.isfinite().all()


def test_records_have_the_temperature_by_validation_and_the_nll_of_test_examples_at_it() -> None:
    (p, y), (p_test, y_test) = make_overconfident(400, 4), make_overconfident(300, 5)
    sums = {
        split: {"num_examples": torch.tensor(float(len(y))), NLL_BY_TEMPERATURE: sum_nll_by_temperature(p, y)}
        for split, p, y in (("validation", p, y), ("test", p_test, y_test))
    }
    metrics = compute_scaled_nll(sums["validation"], sums["test"])
    i = TEMPERATURES.index(metrics["temperature"])
    assert sums["validation"][NLL_BY_TEMPERATURE][i] == sums["validation"][NLL_BY_TEMPERATURE].min()
    assert metrics["nll_scaled"] == pytest.approx(float(sums["test"][NLL_BY_TEMPERATURE][i]) / 300)
    none = {"num_examples": torch.tensor(0.0), NLL_BY_TEMPERATURE: torch.zeros(NUM_TEMPERATURES)}
    assert compute_scaled_nll(none, sums["test"]) == {}


def test_scaled_probabilities_are_powers_and_the_temperature_is_that_of_scikit_learn() -> None:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.frozen import FrozenEstimator

    class Probabilities(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
        """Inputs are log-probabilities, which scikit-learn divides by the temperature."""

        classes_ = np.arange(4)

        def fit(self, _x: object, _y: object) -> "Probabilities":
            return self

        def __sklearn_is_fitted__(self) -> bool:
            return True

        def decision_function(self, x: np.ndarray) -> np.ndarray:
            return x

        def predict(self, x: np.ndarray) -> np.ndarray:
            return x.argmax(1)

    p, y = make_overconfident(2000, 3)
    oracle = CalibratedClassifierCV(FrozenEstimator(Probabilities()), method="temperature")
    oracle.fit(p.log().numpy(), y.numpy())
    inverse = oracle.calibrated_classifiers_[0].calibrators[0].beta_
    fitted = fit_temperature(p, y)
    assert fitted == pytest.approx(1 / inverse, rel=0.05)  # half a step of the grid
    assert fitted == pytest.approx(2, rel=0.1)
    powers = p ** (1 / fitted)
    torch.testing.assert_close(scale_probabilities(p, fitted), powers / powers.sum(1, keepdim=True))
    assert fit_temperature(p[:0], y[:0]) == pytest.approx(1)
