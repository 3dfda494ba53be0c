"""Uncertainty: an evaluation together with 20 dropout samples, compared with a single evaluation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.digits import load_digits
from benchmarks.harness import OURS, Measurement, Options, configure_kernels, measure_interleaved
from benchmarks.networks import make_authors_mnist_net, make_batch, make_vgg16, move_to_device
from uefl.core.noise import sampling_mode

MC_SAMPLES = 20
SINGLE = "single evaluation"


def run(options: Options) -> Iterator[Measurement]:
    """Measure evaluation with and without dropout samples on two networks."""
    configure_kernels(options)
    images = load_digits(options.data)
    batch_size = 8 if options.tiny else 1024 if options.on_cuda else 64
    nets = {"authors' MNIST network": make_authors_mnist_net(tiny=options.tiny)}
    if not options.tiny:
        nets["VGG16"] = make_vgg16()
    for name, net_without_codebook in nets.items():
        net = move_to_device(net_without_codebook.add_codebook(4, 256), options.device).eval()
        x, _ = make_batch(images, batch_size, net.input_shape, options.device)

        def predict_with_samples(net=net, x=x) -> object:  # type: ignore[no-untyped-def]
            return net.predict_with_samples(x, MC_SAMPLES)

        def evaluate_once(net=net, x=x) -> object:  # type: ignore[no-untyped-def]
            return net(x)

        def run_full_passes(net=net, x=x) -> object:  # type: ignore[no-untyped-def]
            with sampling_mode(net):
                return [net(x) for _ in range(MC_SAMPLES)]

        with torch.no_grad():
            seconds = measure_interleaved(
                {OURS: predict_with_samples, SINGLE: evaluate_once},
                options,
                calls_per_turn=10 if options.on_cuda else 3,
            )
            seconds |= measure_interleaved({f"{MC_SAMPLES} full forward passes": run_full_passes}, options)
        base = sum(seconds[SINGLE]) / options.repeats
        for contender, values in seconds.items():
            note = f"{sum(values) / options.repeats / base:.3f} single evaluations"
            yield Measurement(contender, f"{name}, {len(x)} images", options.time_unit, values, note)
