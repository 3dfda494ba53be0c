"""Record hashes of the final tensors of every method: `python -m studies.final_tensors record.json`.

Two versions of the code that train the same models write the same file. Hashes cover values, not names: a tensor counts
by its type, shape and bytes. Every method runs on the serial engine in float32 and float64 on 40 images per silo; a few
more settings run beside them, and the division into silos is hashed for every cut.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uefl.algorithms import ALGORITHMS
from uefl.commands.words import spoken
from uefl.data import CUTS, defaults
from uefl.engines import Serial
from uefl.experiment import DTYPES, Experiment

SMALL = "train=40 test=20 width=4 hidden=16 rounds=3 extra_rounds=2 iterations=2 epochs=1 batch=20 passes=3".split()
BOOK = "words=8 gamma=0 errors=0".split()
SETTINGS = {
    "uefl ensemble of two": "uefl members=2",
    "uefl optimizer kept": "uefl fresh=false",
    "uefl gaussian new codewords": "uefl new=gaussian first=gaussian",
    "uefl two segments": "uefl segments=2",
    "uefl paper": "uefl normalise=none commitment=1",
    "uefl left-out domain": "uefl cut=held-out target=rotate:75 silos=5",
    "uefl sgd cosine": "uefl optimizer=sgd schedule=cosine clip=1",
    "uefl augmented": "uefl augment=crop:2+flip",
    "uefl dropout at logits": "uefl dropout_at=logits watch_train=true watch_local=true",
    "vq-fedavg per domain": "vq-fedavg books=domain",
    "fedavg four per round": "fedavg participation=4",
    "fedavg equal weights": "fedavg weights=equal norms=skip",
    "fedavg local norms": "fedavg norms=local",
    "fedavg lenet": "fedavg encoder=lenet-fmnist",
    "fedavg group norm": "fedavg encoder=gn-conv",
    "fedavg dirt": "fedavg encoder=dirt",
    "fedavg mlp": "fedavg encoder=mlp",
    "fedprox with codebook": "fedprox codebook=on",
    "scaffold with codebook": "scaffold codebook=on",
    "fedbn with codebook": "fedbn codebook=on",
    "fedsr with codebook": "fedsr codebook=on",
    "fedavg noisy domains": "fedavg shifts=none,noise:25,contrast:0.5",
}
NAMES = {"alone": "local-only", "pooled": "centralized"}


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    """Hash a collection of tensors by type, shape and bytes, whatever their names and their order."""
    each = []
    for tensor in tensors:
        value = tensor.detach().cpu().contiguous()
        kind = f"{value.dtype} {tuple(value.shape)} ".encode()
        each.append(hashlib.sha256(kind + value.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest())
    return hashlib.sha256("".join(sorted(each)).encode()).hexdigest()[:16]


def hash_run(experiment: Experiment) -> str:
    """Run an experiment to its end and hash the server's and the silos' tensors."""
    silos, images = experiment.data.load(experiment.seed)
    method = experiment.method
    silos = list(method.prepare(silos))
    net = experiment.network(tuple(silos[0].test.x.shape[1:]), len(images.classes))
    clients = Serial(silos, net, seed=experiment.seed, dtype=DTYPES[experiment.precision])
    server = method.start(clients)
    while server.round < method.budget:
        server = method.step(clients, server).but(records=())
    kept = [t for mine in clients.memory.values() for t in mine.values()]
    return hash_tensors([*server.state.values(), server.access, *server.memory.values(), *kept])


def hash_silos(cut: str) -> str:
    """Hash what every silo holds under a cut of the embedded digits."""
    silos, _ = defaults("mnist5k", cut).load(0)
    return hash_tensors([t for s in silos for part in (s.train, s.validation, s.test) for t in part])


def list_runs() -> Mapping[str, Experiment]:
    """The runs to hash, by label."""
    runs = {NAMES.get(name, name): name for name in ALGORITHMS} | SETTINGS
    found: dict[str, Any] = {}
    for label, text in runs.items():
        words = text.split()
        own = BOOK if "codebook=on" in words or ALGORITHMS[words[0]]().codebook else []
        for precision in ("float32", "float64"):
            (experiment,) = spoken([*words, *SMALL, *own, f"precision={precision}"], (), "default").values()
            found[f"{label}, {precision}"] = experiment
    return found


def main(path: Path) -> None:
    torch.set_num_threads(1)
    record = {f"silos of {cut}": hash_silos(cut) for cut in CUTS if cut != "given"}  # the digits name no silos
    for label, experiment in list_runs().items():
        record[label] = hash_run(experiment)
        sys.stderr.write(f"{label}: {record[label]}\n")
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
