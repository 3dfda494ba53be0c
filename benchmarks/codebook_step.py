"""The codebook's share of a training step of the authors' MNIST network: 64, 256 and 1024 codewords, four segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.digits import load_digits
from benchmarks.harness import Measurement, Options, configure_kernels, measure_interleaved
from benchmarks.networks import make_authors_mnist_net, make_batch, move_to_device
from uefl.core.codebook import Codebook

CODEBOOK_SIZES = (64, 256, 1024)
BASELINE = "step without codebook"


def run(options: Options) -> Iterator[Measurement]:
    """Measure a step without a codebook, and what a codebook adds to it."""
    configure_kernels(options)
    batch_size = 4 if options.tiny else 1024 if options.on_cuda else 32
    net = move_to_device(make_authors_mnist_net(tiny=options.tiny), options.device).train()
    x, y = make_batch(load_digits(options.data), batch_size, net.input_shape, options.device)
    with torch.no_grad():
        z = net.encode(x)
    z.requires_grad_()
    output_gradient = torch.randn_like(z)

    def make_step(bf16: bool) -> Callable[[], object]:
        optimizer = make_adam(net, options)

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                loss = cross_entropy(net(x).logits[0], y)
            loss.backward()
            optimizer.step()

        return capture_cuda_graph(step) if options.on_cuda else step

    def make_codebook_step(num_codewords: int, bf16: bool) -> Callable[[], object]:
        codebook = Codebook(z.shape[-1], 4, num_codewords).to(options.device)
        optimizer = make_adam(codebook, options)

        def step() -> None:
            # What the codebook adds to a step: its forward pass, losses, gradients and update.
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                quantized = codebook(z)
                losses = 0.25 * quantized.commitment_loss + quantized.codebook_loss
                loss = (quantized.z * output_gradient).sum() + losses
            loss.backward()
            optimizer.step()

        return capture_cuda_graph(step) if options.on_cuda else step

    for precision, bf16 in {"in TF32": False, "in bf16": True}.items() if options.on_cuda else (("", False),):
        contenders = {BASELINE: make_step(bf16)}
        contenders |= {f"codebook of {size}": make_codebook_step(size, bf16) for size in CODEBOOK_SIZES}
        seconds = measure_interleaved(contenders, options, calls_per_turn=10)
        base = sorted(seconds[BASELINE])[options.repeats // 2]
        for contender, values in seconds.items():
            share = sorted(values)[options.repeats // 2] / base
            note = "" if contender == BASELINE else f"{100 * share:.2f} % of a step"
            quantity = f"a step of {batch_size} images {precision}".strip()
            yield Measurement(contender, quantity, options.time_unit, values, note)


def make_adam(net: nn.Module, options: Options) -> torch.optim.Adam:
    """Make an optimizer that a CUDA graph can capture."""
    return torch.optim.Adam(net.parameters(), 1e-4, fused=options.on_cuda, capturable=options.on_cuda)


def capture_cuda_graph(step: Callable[[], object]) -> Callable[[], object]:
    """Capture a step as a CUDA graph, as the engine runs it."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_alive: object = step) -> None:  # the step's tensors must live as long as the graph
        graph.replay()

    return replay
