"""Choose the silo whose model fits some inputs best, for inputs whose origin is not known.

With codewords of their own, the silo with the smallest mean squared distance between features and codewords is chosen;
where silos differ by other parts, the one with the lowest mean predictive entropy. The same number on the silo's
validation examples shows whether it fits. No silo fits if the distances differ, or if the entropy is higher, by more
than three standard errors.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from uefl.core.errors import InputError
from uefl.core.federation import iterate_batch_slices
from uefl.engines.serial import to_channels_last
from uefl.experiment.silo_models import SiloModels
from uefl.experiment.trained_model import TrainedModel

AUTO = "auto"  # in place of a silo's name
MAX_STANDARD_ERRORS = 3.0
NO_GUARANTEE = "no coverage is guaranteed for a silo that is chosen by its inputs"


class SiloChoice(NamedTuple):
    """The silo that fits best, and whether it fits."""

    silo_name: str  # empty: the models of all silos are equal
    scores: dict[str, float]  # mean distance or entropy, by silo; smaller is better
    measure: str = ""  # what the scores are
    standard_errors: float = 0.0  # by which the score differs from that of the silo's validation examples

    @property
    def fits(self) -> bool:
        """Whether the inputs are as near to the silo's model as its own examples."""
        return abs(self.standard_errors) <= MAX_STANDARD_ERRORS

    def describe(self) -> str:
        """Return the choice in one line."""
        if not self.scores:
            return f"silo {AUTO}: the models of all silos are equal; {NO_GUARANTEE}"
        name, score = self.silo_name, self.scores[self.silo_name]
        if self.fits:
            return f"silo {AUTO}: {name} fits best, {self.measure} {score:.3g}; {NO_GUARANTEE}"
        return (
            f"warning: silo {AUTO}: no silo fits these inputs; the nearest is {name}, {self.measure} {score:.3g}, "
            f"{abs(self.standard_errors):.1f} standard errors from that of its own examples; {NO_GUARANTEE}"
        )


def choose_silo(models: SiloModels, x: Tensor, device: str = "cpu") -> SiloChoice:
    """Choose the silo whose model fits converted inputs best, among those with training data."""
    if not len(x):
        raise InputError(f"silo {AUTO} needs at least one input")
    if not models.has_own_parts and not models.description.owner:
        return SiloChoice("", {})
    uses_codewords = _compares_codewords(models)
    values: dict[str, Tensor] = {}
    for name in _list_candidates(models):
        model = models.build(name, device)
        values[name] = measure_distances(model, x) if uses_codewords else measure_entropy(model, x)
    scores = {name: float(value.mean()) for name, value in values.items()}
    best = min(scores, key=lambda name: scores[name])
    measure = "mean distance to its codewords" if uses_codewords else "mean predictive entropy"
    reference, variance = (
        models.description.silos[best].reference,
        float(values[best].var()) if len(x) > 1 else math.nan,
    )
    if uses_codewords:
        error = _count_standard_errors(reference, "quantization_error", scores[best], variance, variance, len(x))
    else:
        own_variance = reference.get("entropy_variance", math.nan)
        error = max(_count_standard_errors(reference, "entropy", scores[best], variance, own_variance, len(x)), 0.0)
    return SiloChoice(best, scores, measure, error)


def measure_distances(model: TrainedModel, x: Tensor) -> Tensor:
    """Return for each input the mean squared distance between its features and their codewords: [n]."""
    members = getattr(model.net, "members", [model.net])
    batches = []
    with torch.no_grad():
        for batch in iterate_batch_slices(len(x), model.batch_size):
            inputs = to_channels_last(x[batch].to(model.device, model.dtype))
            distances = []
            for member, segments in zip(members, model.net.encode_segments(inputs)):
                codebook = member.codebook
                error = (segments - codebook.look_up(codebook.find_nearest(segments))).square().mean(1)
                distances.append(codebook.scale * error.reshape(len(inputs), -1).mean(1))
            batches.append(torch.stack(distances).mean(0))
    return torch.cat(batches).cpu()


def measure_entropy(model: TrainedModel, x: Tensor) -> Tensor:
    """Return the predictive entropy of each input: [n]."""
    batches = enumerate(iterate_batch_slices(len(x), model.batch_size))
    return torch.cat([torch.from_numpy(model.predict_batch(x[s], i).uncertainty.entropy) for i, s in batches])


def _compares_codewords(models: SiloModels) -> bool:
    """Return whether silos are compared by their codewords; models of silos' own may differ by their weights alone."""
    if not models.access.numel() or models.without_own_models().personal_names:
        return False
    have_equal_codewords = bool((models.access == models.access[:1]).all())
    return not (have_equal_codewords and models.personal_names) or bool(models.description.owner)


def _list_candidates(models: SiloModels) -> list[str]:
    """Return the silos with training data; of silos with the same codewords and nothing else of their own, one."""
    names = models.description.silo_names
    trained = [name for name in names if models.description.silos[name].num_examples]
    if models.personal_tensors or models.personal_names or models.method.uses_label_prior:
        return trained
    rows = {tuple(models.access[names.index(name)].tolist()): name for name in reversed(trained)}
    return sorted(rows.values())


def _count_standard_errors(
    reference: dict[str, float], metric: str, score: float, variance: float, own_variance: float, n: int
) -> float:
    """Return by how many standard errors a mean differs from the one on the silo's validation examples, if known."""
    own_examples = reference.get("num_examples", 0.0)
    if metric not in reference or not own_examples or math.isnan(variance + own_variance):
        return 0.0
    standard_error = math.sqrt(variance / n + own_variance / own_examples)
    return (score - reference[metric]) / max(standard_error, 1e-12)
