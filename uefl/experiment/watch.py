"""Watch a silo's data: compare new inputs with the silo's calibration examples, as its model sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from uefl.core import noise_addresses as addresses
from uefl.core.drift import ENTROPY, Array, Comparison, compare_examples
from uefl.core.errors import InputError
from uefl.core.federation import iterate_batch_slices
from uefl.core.noise import derive_key
from uefl.data.preview import save_new_file
from uefl.data.readers.context import ReadContext
from uefl.experiment.held_out import HeldOut, Measurements, measure_examples
from uefl.experiment.silo_models import SiloModels

MIN_EXAMPLES = 10  # of both sides: with fewer, hardly any change can be told from chance
FEW_EXAMPLES = 50  # of new inputs: with fewer, only large changes are found
_NUM_BARS = 12  # codewords in the picture


@dataclass(frozen=True)
class WatchReport:
    """The answer whether inputs are still a silo's data."""

    silo_name: str
    reference: HeldOut
    new: Measurements
    comparisons: Sequence[Comparison]
    looks: int

    @property
    def is_alarm(self) -> bool:
        """Whether one of the tests finds a difference."""
        return any(comparison.is_alarm for comparison in self.comparisons)

    def describe(self) -> list[str]:
        """Return the answer in words: the verdict, one line per test, and what it does not say."""
        n, m = len(self.reference.labels), len(self.new.entropy)
        if self.is_alarm:
            changed = " and ".join(c.name for c in self.comparisons if c.is_alarm)
            lines = [f"ALARM: the {m} inputs are not like the data of silo {self.silo_name}; they differ in {changed}."]
        else:
            lines = [f"No alarm: nothing shows that the {m} inputs are not like the data of silo {self.silo_name}."]
        lines += [self._describe_comparison(comparison) for comparison in self.comparisons]
        look = f"one of {self.looks} planned looks" if self.looks > 1 else "a single look"
        lines.append(f"Reference: {n} examples, {self.reference.source}. Levels are those of {look}.")
        if not self.is_alarm and m < FEW_EXAMPLES:
            lines.append(f"{m} inputs are few: only a large change would be found.")
        if len(self.comparisons) == 1:
            lines.append("This model has no codewords: only the entropy is tested.")
        return lines

    def _describe_comparison(self, comparison: Comparison) -> str:
        detail = ""
        if comparison.name == ENTROPY:
            before, now = (float(m.entropy.double().median()) for m in (self.reference.measurements, self.new))
            detail = f"; median {before:.3g} before, {now:.3g} now"
        sign = "≤" if comparison.is_alarm else ">"
        return (
            f"{comparison.name}: distance {comparison.statistic:.3f}, p = {comparison.p_value:.4g} {sign} "
            f"{comparison.level:.4g}{detail}"
        )


def watch_silo(
    models: SiloModels, silo_name: str, x: Tensor, *, level: float, looks: int, device: str = "cpu"
) -> WatchReport:
    """Compare converted inputs with the calibration examples of a silo."""
    reference = models.held_out.get(silo_name)
    if reference is None:
        raise InputError(
            f"silo {silo_name} has no reference; train with calibration_fraction=0.2, or give labeled files of the "
            "silo to `uefl calibrate`"
        )
    for count, what in ((len(reference.labels), "reference examples"), (len(x), "inputs")):
        if count < MIN_EXAMPLES:
            raise InputError(f"{count} {what} are too few to tell a change from chance; {MIN_EXAMPLES} are needed")
    model = models.build(silo_name, device)
    # The batches of the reference have other draws of dropout: equal draws would make inputs alike.
    num_batches = len(list(iterate_batch_slices(len(reference.labels), model.batch_size)))
    new = measure_examples(model, x, first_batch=num_batches, show_progress=True)
    own = reference.measurements
    comparisons = compare_examples(
        *(_to_array(t) for t in (own.entropy, new.entropy, own.codeword_counts, new.codeword_counts)),
        level=level,
        looks=looks,
        seed=derive_key(models.description.seed, silo_name, addresses.DRIFT_PERMUTATIONS),
        track=lambda blocks, total: ReadContext(show_progress=True).track_progress(blocks, "permuting", total),
    )
    return WatchReport(silo_name, reference, new, comparisons, looks)


def _to_array(tensor: Tensor) -> Array:
    array: Array = tensor.double().numpy()
    return array


def draw_watch(report: WatchReport, path: Path) -> Path:
    """Draw distributions of entropy and use of codewords; return the path, a new name if the file exists."""
    own, new = report.reference.measurements, report.new
    has_codewords = bool(own.codeword_counts.shape[1])
    figure = Figure(figsize=(10 if has_codewords else 5, 4), layout="constrained")
    axes = figure.subplots(1, 1 + has_codewords, squeeze=False)[0]
    for values, name, color in ((own.entropy, "reference", "C0"), (new.entropy, "new", "C1")):
        in_order = np.sort(_to_array(values))
        axes[0].step(in_order, np.arange(1, len(in_order) + 1) / len(in_order), where="post", label=name, color=color)
    axes[0].set_xlabel("predictive entropy (nats)")
    axes[0].set_ylabel("share of examples with at most this entropy")
    if has_codewords:
        use = [_to_array(m.codeword_counts).sum(0) for m in (own, new)]
        shares = [counts / counts.sum() for counts in use]
        chosen = np.argsort(-np.abs(shares[0] - shares[1]))[:_NUM_BARS]
        for i, (share, name) in enumerate(zip(shares, ("reference", "new"))):
            axes[1].bar(np.arange(len(chosen)) + 0.4 * i, share[chosen], 0.4, label=name, color=f"C{i}")
        axes[1].set_xticks(np.arange(len(chosen)) + 0.2, [str(c) for c in chosen])
        axes[1].set_xlabel("codewords with the largest differences")
        axes[1].set_ylabel("share of features")
    for plot, place in zip(axes, ("lower right", "upper right")):  # a search for the best place can take seconds
        plot.legend(loc=place)
        plot.grid(alpha=0.3)
    figure.suptitle(f"silo {report.silo_name}: {'ALARM' if report.is_alarm else 'no alarm'}")
    return save_new_file(figure, path)
