"""K-means, 98 000 x 128 real features to 256 codewords, compared with scikit-learn's KMeans(n_init=1, max_iter=20)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.digits import load_digits
from benchmarks.features import compute_features
from benchmarks.harness import OURS, Measurement, Options, measure_seconds, report_missing
from uefl.core.kmeans import assign_points, kmeans


def run(options: Options) -> Iterator[Measurement]:
    """Measure time and inertia of K-means, one seed per turn."""
    num_codewords, num_images, num_steps = (16, 40, 2) if options.tiny else (256, 2000, 60)
    points = compute_features(load_digits(options.data), num_images, options.device, num_steps)
    cpu_points = points.cpu()

    def run_uefl(seed: int) -> Tensor:
        return kmeans(points, num_codewords, noise_key=seed).centroids

    def run_sklearn(seed: int) -> Tensor:
        from sklearn.cluster import KMeans

        fitted = KMeans(num_codewords, n_init=1, max_iter=20, random_state=seed).fit(cpu_points.numpy())
        return torch.from_numpy(fitted.cluster_centers_)

    contenders: dict[str, tuple[Callable[[int], Tensor], str]] = {OURS: (run_uefl, options.device)}
    if find_spec("sklearn"):
        import sklearn.cluster  # noqa: F401  # before the clock starts

        contenders["scikit-learn"] = (run_sklearn, "cpu")
    else:
        report_missing("scikit-learn")
    run_uefl(-1)  # the first call on a device includes its initialization
    seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    inertia: dict[str, list[float]] = {contender: [] for contender in contenders}
    for seed in range(options.repeats):
        for contender, (run_kmeans, device) in contenders.items():
            centroids: list[Tensor] = []

            def work(run_kmeans=run_kmeans, centroids=centroids, seed=seed) -> None:  # type: ignore[no-untyped-def]
                centroids.append(run_kmeans(seed))

            seconds[contender].append(measure_seconds(work, device))
            # In double precision for all contenders.
            squared_distances = assign_points(cpu_points.double(), centroids[0].double().cpu())[1]
            inertia[contender].append(float(squared_distances.mean()))
    for contender, (_, device) in contenders.items():
        quantity = f"{len(cpu_points)} x {cpu_points.shape[1]} to {num_codewords} codewords"
        yield Measurement(contender, quantity, "CPU s" if device == "cpu" else "s", seconds[contender])
    for contender in contenders:
        mean = sum(inertia[contender]) / options.repeats
        ratio = mean / (sum(inertia["scikit-learn"]) / options.repeats) if "scikit-learn" in inertia else float("nan")
        note = f"mean over seeds, relative to scikit-learn: {ratio:.4f}"
        yield Measurement(
            contender, "inertia per point, one seed per turn", "squared distance", inertia[contender], note
        )
