"""The release's MNIST set-up on a GPU: 9 silos x 2000, blocks of 128/256/512, batch 1024, 20 epochs, whole rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.eager import Eager
from benchmarks.frame import Figure, Options
from benchmarks.gpu import Ours, rounds
from benchmarks.images import digits, silos
from uefl.algorithms import UEFL, Book
from uefl.local import Local
from uefl.models.net import Net
from uefl.models.residual import ResidualEncoder


def run(o: Options) -> Iterator[Figure]:
    count, train, test, width = (2, 64, 32, 8) if o.tiny else (9, 2000, 500, 128)
    local = Local(
        optimizer="adam", rate=1e-3, batch=32 if o.tiny else 1024, epochs=2 if o.tiny else 20, evaluation_batch=512
    )
    book = Book(words=64, segments=1, first="gaussian", warm_up=0, commitment=0.25, codeword=1.0)
    method = UEFL(rounds=50, iterations=1, local=local, codebook=book, watch_local=False)
    torch.manual_seed(0)
    net = Net(ResidualEncoder(width=width, depth=3), 10, (1, 28, 28), hidden=512)
    built: Any = method.build(net)
    where = silos(digits(o.data), count, train, test)
    if o.cuda:
        ours = {
            "uefl": Ours(method, built, where, o.device, multiply="bf16", compiled=True),
            "uefl, not compiled": Ours(method, built, where, o.device, multiply="bf16"),
        }
    else:
        ours = {"uefl": Ours(method, built, where, o.device, multiply="exact")}
    peer = Eager(built, where, local, method.passes, o.device)
    yield from rounds(ours, peer, count * local.epochs * (train / local.batch), o)
