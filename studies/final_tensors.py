"""Hash the final tensors of every method, to check that a change of the code leaves every number as it was.

`python -m studies.final_tensors --out FILE` writes the hashes; `--check results/final-tensors.json` compares them with
a file, names each label that differs and exits with 1 if one does. A hash covers values, not names: the type, shape and
bytes of each tensor. Every method runs on the serial engine in float32 and float64 with 40 images per silo, then a few
more settings; the examples of every silo are hashed for every partitioner.

Bits of training depend on the kind of processor: on another kind, every run differs and only the silos are the same.
There, write the hashes of the earlier commit first (`--out`), and compare with those.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from uefl.algorithms import METHODS
from uefl.data import PARTITIONERS
from uefl.data.defaults import get_default_config
from uefl.engines.serial import SerialEngine
from uefl.experiment.experiment import DTYPES, Experiment
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.rounds import iterate_rounds

SMALL = [
    "train_per_silo=40",
    "test_per_silo=20",
    "width=4",
    "hidden_size=16",
    "rounds=3",
    "extra_rounds=2",
    "iterations=2",
    "epochs=1",
    "batch_size=20",
    "mc_samples=3",
    "public_images=40",
]
CODEBOOK = [
    *("num_codewords=8", "segments=4", "gamma=0", "min_standard_errors=0", "commitment_weight=0.01"),
    *("codeword_gradient=code", "gate=none", "gate_value=0.75"),
]
NO_OWN_MODELS = ["fine_tuning_epochs=0", "group_rounds=0"]  # of UEFL in the records; its preset has own models since
SETTINGS = {
    "uefl ensemble of two": "uefl ensemble_size=2",
    "uefl optimizer kept": "uefl reset_optimizer=false",
    "uefl gaussian new codewords": "uefl new_codeword_init=gaussian codebook_init=gaussian",
    "uefl two segments": "uefl segments=2",
    "uefl paper": "uefl feature_norm=none commitment_weight=1",
    "uefl left-out domain": "uefl partitioner=leave-one-domain-out target=rotate:75 num_silos=5",
    "uefl sgd cosine": "uefl optimizer=sgd schedule=cosine max_grad_norm=1",
    "uefl augmented": "uefl augment=crop:2+flip",
    "uefl dropout at logits": "uefl dropout_at=logits evaluate_train=true evaluate_local=true",
    "vq-fedavg per domain": "vq-fedavg initial_codebook=per_domain",
    "fedavg four per round": "fedavg clients_per_round=4",
    "fedavg equal weights": "fedavg aggregation_weights=uniform batch_norm=not_averaged",
    "fedavg local norms": "fedavg batch_norm=local",
    "fedavg lenet": "fedavg encoder=lenet-fmnist",
    "fedavg group norm": "fedavg encoder=group-norm-conv",
    "fedavg dirt": "fedavg encoder=dirt",
    "fedavg mlp": "fedavg encoder=mlp",
    "fedprox with codebook": "fedprox codebook=on",
    "scaffold with codebook": "scaffold codebook=on",
    "fedbn with codebook": "fedbn codebook=on",
    "fedsr with codebook": "fedsr codebook=on",
    "fedavg noisy domains": "fedavg shifts=none,noise:25,contrast:0.5",
}


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    """Hash tensors by type, shape and bytes, whatever their names and their order."""
    digests = []
    for tensor in tensors:
        value = tensor.detach().cpu().contiguous()
        kind = f"{value.dtype} {tuple(value.shape)} ".encode()
        digests.append(hashlib.sha256(kind + value.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest())
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()[:16]


def hash_run(experiment: Experiment) -> str:
    """Run an experiment to its end and hash the server's and the silos' tensors."""
    silos, images = experiment.data.load(experiment.seed)
    method = experiment.method
    silos = list(method.prepare_silos(silos))
    net = experiment.build_network(tuple(silos[0].test.x.shape[1:]), len(images.classes))
    clients = SerialEngine(silos, net, seed=experiment.seed, dtype=DTYPES[experiment.precision])
    *_, server = iterate_rounds(method, clients)
    client_tensors = [t for client_state in clients.client_states.values() for t in client_state.values()]
    return hash_tensors([*server.model_state.values(), server.access, *server.method_state.values(), *client_tensors])


def hash_silos(partitioner: str) -> str:
    """Hash the examples of every silo of the embedded digits."""
    silos, _ = get_default_config("mnist5k", partitioner).load(0)
    return hash_tensors([t for s in silos for examples in (s.train, s.validation, s.test) for t in examples])


def list_runs() -> Mapping[str, Experiment]:
    """List the runs to hash, by label."""
    runs: dict[str, Experiment] = {}
    for label, text in ({name: name for name in METHODS} | SETTINGS).items():
        arguments = text.split()
        has_codebook = "codebook=on" in arguments or METHODS[arguments[0]]().codebook
        named = {argument.partition("=")[0] for argument in arguments}
        codebook = [s for s in CODEBOOK if has_codebook and s.partition("=")[0] not in named]
        # The group-norm encoder has no width.
        small = [setting for setting in SMALL if not (setting.startswith("width=") and "encoder=g" in text)]
        own_models = NO_OWN_MODELS if arguments[0] == "uefl" else []
        for precision in ("float32", "float64"):
            settings = [*arguments, *small, *codebook, *own_models, f"precision={precision}"]
            (runs[f"{label}, {precision}"],) = parse_experiments(settings, (), "default").values()
    return runs


def hash_all() -> Iterator[tuple[str, str]]:
    """Yield the label and the hash of every partitioner and every run."""
    for partitioner in PARTITIONERS:
        if partitioner != "natural":  # the digits have no silos of their own
            yield f"silos of {partitioner}", hash_silos(partitioner)
    for label, experiment in list_runs().items():
        yield label, hash_run(experiment)


def main(
    out: Annotated[Path | None, typer.Option(help="File to write the hashes to.")] = None,
    check: Annotated[Path | None, typer.Option(help="File of hashes to compare with.")] = None,
) -> None:
    """Hash every run; write the hashes, compare them, or print them."""
    torch.set_num_threads(1)
    hashes = {}
    for label, value in hash_all():
        hashes[label] = value
        typer.echo(f"{label}: {value}", err=True)
    if out:
        out.write_text(json.dumps(hashes, indent=1) + "\n")
    different = find_differences(hashes, json.loads(check.read_text())) if check else []
    for label in different:
        typer.echo(f"differs: {label}")
    raise typer.Exit(1 if different else 0)


def find_differences(hashes: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """List the labels whose hashes differ, or that only one of the two has."""
    return [label for label in dict.fromkeys([*expected, *hashes]) if hashes.get(label) != expected.get(label)]


if __name__ == "__main__":
    typer.run(main)
