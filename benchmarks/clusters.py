"""K-means, 98 000 x 128 real features to 256 words, beside scikit-learn's KMeans(n_init=1, max_iter=20)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.features import features
from benchmarks.frame import Figure, Options, missing, seconds
from benchmarks.images import digits
from uefl.kmeans import assign, kmeans


def run(o: Options) -> Iterator[Figure]:
    words, images, steps = (16, 40, 2) if o.tiny else (256, 2000, 60)
    points = features(digits(o.data), images, o.device, steps)
    here = points.cpu()

    def ours(seed: int) -> Tensor:
        return kmeans(points, words, key=seed).centroids

    def theirs(seed: int) -> Tensor:
        from sklearn.cluster import KMeans

        return torch.from_numpy(
            KMeans(words, n_init=1, max_iter=20, random_state=seed).fit(here.numpy()).cluster_centers_
        )

    contenders: dict[str, tuple[Callable[[int], Tensor], str]] = {"uefl": (ours, o.device)}
    if find_spec("sklearn"):
        import sklearn.cluster  # noqa: F401  # so that no figure holds the import

        contenders["scikit-learn"] = (theirs, "cpu")
    else:
        missing("scikit-learn")
    ours(-1)  # a device's first call pays for its start
    spent: dict[str, list[float]] = {who: [] for who in contenders}
    inertia: dict[str, list[float]] = {who: [] for who in contenders}
    for seed in range(o.repeats):
        for who, (work, device) in contenders.items():
            found: list[Tensor] = []
            spent[who].append(seconds(lambda work=work, found=found: found.append(work(seed)), device))  # type: ignore[misc]  # noqa: B023
            # Judged alike, in double precision.
            inertia[who].append(float(assign(here.double(), found[0].double().cpu())[1].mean()))
    clock = "s" if o.cuda else "CPU s"
    for who in contenders:
        unit = "CPU s" if who != "uefl" else clock
        yield Figure(who, f"{len(here)} x {here.shape[1]} to {words} words", unit, spent[who])
    for who in contenders:
        mean = sum(inertia[who]) / o.repeats
        ratio = mean / (sum(inertia["scikit-learn"]) / o.repeats) if "scikit-learn" in inertia else float("nan")
        note = f"mean of seeds over scikit-learn's: {ratio:.4f}"
        yield Figure(who, "inertia a point, a seed each", "squared distance", inertia[who], note)
