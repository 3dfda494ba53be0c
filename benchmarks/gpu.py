"""What both GPU benchmarks share: whole rounds of us and of an eager loop, taking turns, and what a step must cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.eager import Eager
from benchmarks.frame import US, Figure, Options, seconds, take_turns
from uefl.algorithms import FedAvg
from uefl.engines import Stacked
from uefl.engines.serial import choose_kernels
from uefl.federation import Multiply, Server, Silo
from uefl.models.net import Net


class Ours:
    """A federation of ours that goes on round by round."""

    def __init__(
        self,
        method: FedAvg,
        net: Net,
        silos: Sequence[Silo],
        device: str,
        *,
        multiply: Multiply,
        compiled: bool = False,
    ) -> None:
        self.method = method
        self.clients = Stacked(silos, net, device=device, multiply=multiply, compiled=compiled)
        self.server: Server = method.start(self.clients)

    def round(self) -> None:
        choose_kernels(tf32=True, repeatable=True)  # process-wide, and contenders take turns
        self.server = self.method.round(self.clients, self.server)

    def train(self) -> None:
        """A round's training alone."""
        choose_kernels(tf32=True, repeatable=True)
        say = self.method.say(self.clients, self.server)._replace(round=self.server.round + 1)
        for _ in self.clients.fit(self.method, say, measure=False):
            pass


def rounds(contenders: dict[str, Ours], peer: Eager, steps: float, o: Options) -> Iterator[Figure]:
    """Seconds of a whole round of each, and training's share of what the device can do."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for ours in contenders.values():  # plain, captured, replayed
        ours.round()
        ours.round()
    peer.round()
    turns = take_turns({**{who: c.round for who, c in contenders.items()}, "eager loop": peer.round}, o)
    for who, values in turns.items():
        yield Figure(who, "a whole round", "s", values)
    flops = step_flops(peer) * steps
    for who, ours in contenders.items():
        spent = [seconds(ours.train, o.device) for _ in range(o.repeats)]
        yield Figure(who, "training alone", "s", spent)
        yield Figure(who, "while training", "TFLOP/s", [flops / s / 1e12 for s in spent])
    if o.cuda:
        yield from shares(US, contenders[US], o)
    x, y, _, _ = peer.parts[0]
    spent = [seconds(lambda: peer.train(x, y), o.device) * len(peer.parts) for _ in range(o.repeats)]
    yield Figure("eager loop", "training alone", "s", spent)
    yield Figure("eager loop", "while training", "TFLOP/s", [flops / s / 1e12 for s in spent])


KERNELS = {  # what a kernel's name says it does; the first that fits
    "optimiser": ("adam", "multi_tensor_apply", "FusedOptimizer"),
    "convolutions and products": (
        *("xmma", "cutlass", "gemm", "convolve", "wgrad", "dgrad", "fprop", "Nhwc", "cudnn", "cublas", "nvjet"),
        *("_forward", "_filters"),  # our own
    ),
    "copies": ("Memcpy", "Memset"),
    "element by element, norms, pooling": ("",),
}


def shares(who: str, ours: Ours, o: Options) -> Iterator[Figure]:
    """Where the device's time goes in a round's training, by kind of kernel; the rest of the time it is idle."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        spent = seconds(ours.train, o.device)
    kinds = dict.fromkeys(KERNELS, 0.0)
    for event in seen.key_averages():
        if event.device_type == DeviceType.CUDA:
            kinds[kind_of(event.key)] += event.self_device_time_total / 1e6
    for kind, busy in {**kinds, "idle": spent - sum(kinds.values())}.items():
        yield Figure(who, f"training alone: {kind}", "s", [busy], f"{100 * busy / spent:.0f} % of {spent:.2f} s")


def kind_of(kernel: str) -> str:
    return next(kind for kind, names in KERNELS.items() if any(name in kernel for name in names))


def step_flops(peer: Eager) -> float:
    """Floating-point operations of one silo's step, forward and backward."""
    x, y, _, _ = peer.parts[0]
    with FlopCounterMode(display=False) as counter:
        seen = peer.net(x[: peer.local.batch])
        (torch.nn.functional.cross_entropy(seen.logits[0], y[: peer.local.batch])).backward()
    return float(counter.get_total_flops())


__all__ = ["US", "Ours", "rounds", "step_flops"]
