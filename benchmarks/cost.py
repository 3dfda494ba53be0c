"""Parameters (shared codewords and those of one silo), time per step and per prediction, of FedAvg and UEFL (T11)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import cross_entropy

from benchmarks.digits import load_digits
from benchmarks.harness import OURS, Measurement, Options, configure_kernels, measure_interleaved
from benchmarks.networks import make_authors_mnist_net, make_batch, make_vgg16, move_to_device

# The paper's codebook for CIFAR10: 64 shared codewords; two extensions that double give a silo 192 more.
SHARED_CODEWORDS, OWN_CODEWORDS = 64, 192
PAPER_PARAMETERS = {"FedAvg": "paper: 14.991 M", OURS: "paper: 15.491 M"}


def run(options: Options) -> Iterator[Measurement]:
    """Count parameters and measure steps and predictions, with and without a codebook."""
    configure_kernels(options)
    images, batch_size = load_digits(options.data), 4 if options.tiny else 256 if options.on_cuda else 16
    nets = {}
    for contender in PAPER_PARAMETERS:
        net = make_authors_mnist_net(tiny=True) if options.tiny else make_vgg16("vgg16-bn")
        if contender == OURS:
            net.add_codebook(1, SHARED_CODEWORDS + OWN_CODEWORDS)
        nets[contender] = move_to_device(net, options.device)
    for contender, net in nets.items():
        num_parameters = sum(p.numel() for p in net.parameters())
        yield Measurement(contender, "parameters", "M", [num_parameters / 1e6], PAPER_PARAMETERS[contender])
    num_features = nets[OURS].num_features
    for quantity, num_codewords in {
        f"of these, {SHARED_CODEWORDS} shared codewords": SHARED_CODEWORDS,
        f"of these, {OWN_CODEWORDS} codewords of one silo": OWN_CODEWORDS,
    }.items():
        yield Measurement(OURS, quantity, "M", [num_codewords * num_features / 1e6])
    x, y = make_batch(images, batch_size, nets[OURS].input_shape, options.device)
    steps: dict[str, Callable[[], object]] = {}
    for contender, net in nets.items():
        optimizer = torch.optim.Adam(net.parameters(), 1e-4)

        def step(net=net, optimizer=optimizer) -> None:  # type: ignore[no-untyped-def]
            optimizer.zero_grad()
            prediction = net.train()(x)
            loss = cross_entropy(prediction.logits[0], y)
            (loss + prediction.commitment_loss + 0.25 * prediction.codebook_loss).backward()
            optimizer.step()

        steps[contender] = step
    for contender, values in measure_interleaved(steps, options, calls_per_turn=10 if options.on_cuda else 3).items():
        yield Measurement(contender, f"a step of {batch_size} images", options.time_unit, values)
    for net in nets.values():
        net.eval()
    for size in (1, batch_size):
        predictions: dict[str, Callable[[], object]] = {
            contender: lambda net=net, size=size: net(x[:size])  # type: ignore[misc]
            for contender, net in nets.items()
        }
        with torch.no_grad():
            seconds = measure_interleaved(predictions, options, calls_per_turn=20)
        for contender, values in seconds.items():
            quantity = f"per prediction, batches of {size}"
            yield Measurement(contender, quantity, options.time_unit, [v / size for v in values])
