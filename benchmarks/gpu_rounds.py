"""Shared parts of the GPU benchmarks: interleaved whole rounds of uefl and of an eager loop, and the cost of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.eager_loop import EagerLoop
from benchmarks.harness import OURS, Measurement, Options, measure_interleaved, measure_seconds
from uefl.algorithms.fedavg import FedAvg
from uefl.core.federation import MatmulPrecision, ServerState, Silo
from uefl.engines.serial import choose_kernels
from uefl.engines.stacked.stacked_engine import StackedEngine
from uefl.models.network import Net

EAGER = "eager loop"


class UeflRounds:
    """A federation of uefl that runs round by round."""

    def __init__(
        self,
        method: FedAvg,
        net: Net,
        silos: Sequence[Silo],
        device: str,
        *,
        matmul_precision: MatmulPrecision,
        compiled: bool = False,
    ) -> None:
        self.method = method
        self.clients = StackedEngine(
            silos, net, device=device, matmul_precision=matmul_precision, use_compiler=compiled
        )
        self.server: ServerState = method.initialize_server(self.clients)

    def run_round(self) -> None:
        """Run a whole round."""
        choose_kernels(tf32=True, deterministic=True)  # process-wide, and contenders are interleaved
        self.server = self.method.run_round(self.clients, self.server)

    def train_round(self) -> None:
        """Run a round's training alone."""
        choose_kernels(tf32=True, deterministic=True)
        broadcast = self.method.make_broadcast(self.clients, self.server)._replace(round=self.server.round + 1)
        for _ in self.clients.fit(self.method, broadcast, evaluate=False):
            pass


def measure_rounds(
    contenders: dict[str, UeflRounds], peer: EagerLoop, num_steps: float, options: Options
) -> Iterator[Measurement]:
    """Measure seconds of a whole round of each contender, and the rate of its training."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for rounds in contenders.values():  # the first round is eager, the second is captured, later ones are replayed
        rounds.run_round()
        rounds.run_round()
    peer.run_round()
    seconds = measure_interleaved(
        {**{contender: rounds.run_round for contender, rounds in contenders.items()}, EAGER: peer.run_round}, options
    )
    for contender, values in seconds.items():
        yield Measurement(contender, "a whole round", "s", values)
    flops = count_step_flops(peer) * num_steps
    for contender, rounds in contenders.items():
        spent = [measure_seconds(rounds.train_round, options.device) for _ in range(options.repeats)]
        yield Measurement(contender, "training alone", "s", spent)
        yield Measurement(contender, "while training", "TFLOP/s", [flops / s / 1e12 for s in spent])
    if options.on_cuda:
        yield from profile_kernels(OURS, "training alone", contenders[OURS].train_round, options, flops=flops)
    x, y, _, _ = peer.silo_tensors[0]
    spent = [
        measure_seconds(lambda: peer.train_silo(x, y), options.device) * len(peer.silo_tensors)
        for _ in range(options.repeats)
    ]
    yield Measurement(EAGER, "training alone", "s", spent)
    yield Measurement(EAGER, "while training", "TFLOP/s", [flops / s / 1e12 for s in spent])


KERNEL_KINDS = {  # kind: parts of kernel names; the first kind that matches counts
    "optimizer": ("adam", "multi_tensor_apply", "FusedOptimizer"),
    "filter gradients": ("_filter_gradient_kernel", "wgrad"),
    "data gradients": ("dgrad",),
    "convolutions": ("_forward_kernel", "fprop", "convolve"),  # uefl's kernel also computes data gradients
    "products": ("gemm", "gemv", "nvjet", "cublas", "cutlass", "xmma", "cudnn", "Nhwc"),
    "batch norm": ("_sum_kernel", "_combine_kernel", "batch_norm"),
    "group norm": ("_group_norm",),
    "pooling": ("pool",),
    "copies": ("Memcpy", "Memset", "copy_kernel", "CatArray"),
    "elementwise and reductions": ("",),
}
TENSOR_CORE_KINDS = ("filter gradients", "data gradients", "convolutions", "products")


def profile_kernels(
    contender: str, quantity: str, work: Callable[[], object], options: Options, *, flops: float = 0.0
) -> Iterator[Measurement]:
    """Profile work on a GPU by kind of kernel; the rest of the time the device is idle."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        total = measure_seconds(work, options.device)
    seconds = dict.fromkeys(KERNEL_KINDS, 0.0)
    events = [event for event in profiler.key_averages() if event.device_type == DeviceType.CUDA]
    for event in events:
        seconds[classify_kernel(event.key)] += event.self_device_time_total / 1e6
    if options.kernels:
        rows = sorted(((e.self_device_time_total / 1e3, e.count, e.key) for e in events), reverse=True)
        lines = [f"{ms:9.3f} ms {calls:6d}  {classify_kernel(key):26}  {key[:150]}" for ms, calls, key in rows]
        header = f"{quantity} on {torch.cuda.get_device_name()}, {total * 1e3:.1f} ms: device time, calls, kind, kernel"
        options.kernels.write_text("\n".join([header, "", *lines]) + "\n")
    for kind, spent in {**seconds, "idle": total - sum(seconds.values())}.items():
        note = f"{100 * spent / total:.0f} % of {total:.2f} s"
        yield Measurement(contender, f"{quantity}: {kind}", "s", [spent], note)
    if flops:
        spent = sum(seconds[kind] for kind in TENSOR_CORE_KINDS)
        yield Measurement(contender, "within convolutions and products", "TFLOP/s", [flops / max(spent, 1e-9) / 1e12])


def classify_kernel(kernel: str) -> str:
    """Return the kind of a kernel."""
    return next(kind for kind, parts in KERNEL_KINDS.items() if any(part in kernel for part in parts))


def count_step_flops(peer: EagerLoop) -> float:
    """Count floating-point operations of one silo's step, forward and backward."""
    x, y, _, _ = peer.silo_tensors[0]
    with FlopCounterMode(display=False) as counter:
        prediction = peer.net(x[: peer.local.batch_size])
        torch.nn.functional.cross_entropy(prediction.logits[0], y[: peer.local.batch_size]).backward()
    return float(counter.get_total_flops())
