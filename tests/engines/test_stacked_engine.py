"""The stacked engine agrees with the serial engine: in double precision, with dropout, after an extension."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
from harness import (
    LOCAL,
    SHORT_RUN,
    SMALL_CODEBOOK,
    make_clients,
    make_short_method,
    make_striped_examples,
    make_striped_silo,
    make_striped_silos,
    run_rounds,
)
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from uefl.algorithms import METHODS
from uefl.algorithms.extensible_codebook import Extend
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.uefl import UEFL
from uefl.core.errors import InputError
from uefl.core.federation import Batch, ClientModel, ServerState, Silo
from uefl.core.local import LocalTraining
from uefl.core.noise import batched_permutations, derive_key, permutation
from uefl.engines.serial import SerialEngine
from uefl.engines.stacked import stacked_engine
from uefl.engines.stacked.client_stack import ClientStack, ReceivedClient
from uefl.engines.stacked.device_buffers import DeviceBuffers
from uefl.engines.stacked.stacked_engine import StackedEngine


def make_encoder() -> nn.Module:
    """[B, 1, 8, 8] -> [B, 8, 2, 2]. No bias before batch norm: its gradient is rounding error, which Adam amplifies."""
    first = nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1))


@dataclass(frozen=True, kw_only=True)
class PublicLogitsLoss(FedAvg):
    """Every step also makes the logits of the first public images small."""

    def loss(self, model: ClientModel, batch: Batch) -> torch.Tensor:
        assert model.public_images is not None
        return super().loss(model, batch) + model(model.public_images[:6]).logits[0].square().mean()


make_engine = partial(make_clients, encoder_factory=make_encoder)
ALWAYS_EXTENDED = replace(SMALL_CODEBOOK, uncertainty_test="permutation")
UEFL_METHOD = UEFL(**SHORT_RUN, codebook=ALWAYS_EXTENDED)
TASK_AND_GATE = replace(ALWAYS_EXTENDED, codeword_gradient="task", gate="learned")
CLIPPED_SGD = LocalTraining(optimizer="sgd", lr=0.02, weight_decay=0.01, max_grad_norm=0.5, batch_size=8, epochs=2)
OTHER_METHODS = [name for name in METHODS if name not in ("uefl", "vq-fedavg", "centralized")]
SETUPS: dict[str, tuple[FedAvg, dict[str, Any]]] = {
    "all silos in one stack": (UEFL_METHOD, {}),
    "one silo per stack": (UEFL_METHOD, {"max_stack_size": 1}),
    "two silos per stack": (UEFL_METHOD, {"max_stack_size": 2}),
    "two clients per round": (replace(UEFL_METHOD, clients_per_round=2), {}),
    "stored optimizer state": (replace(UEFL_METHOD, local=replace(LOCAL, reset_optimizer=False)), {}),
    "sgd, clipped, weight decay": (replace(UEFL_METHOD, local=CLIPPED_SGD), {}),
    "adamw, cosine": (
        replace(UEFL_METHOD, local=replace(LOCAL, optimizer="adamw", weight_decay=0.1, schedule="cosine")),
        {},
    ),
    "several evaluation batches": (FedAvg(**{**SHORT_RUN, "local": replace(LOCAL, eval_batch_size=5)}), {}),
    "scaffold, two epochs": (METHODS["scaffold"](**{**SHORT_RUN, "local": replace(CLIPPED_SGD, max_grad_norm=0)}), {}),
    "local batch norm": (replace(UEFL_METHOD, batch_norm="local"), {}),
    "personal batch norm with a codebook": (replace(UEFL_METHOD, batch_norm="personal"), {}),
    "logit adjustment": (replace(UEFL_METHOD, logit_adjustment="local"), {}),
    "codebook of enough examples per codeword": (
        replace(UEFL_METHOD, codebook=replace(ALWAYS_EXTENDED, num_codewords=20, min_examples=10)),
        {"ensemble_size": 2},
    ),
    "ensemble": (UEFL_METHOD, {"ensemble_size": 2}),
    # AdamW would shrink a gate that has no gradient yet.
    "codebook with task gradient and learned gate": (
        replace(UEFL_METHOD, codebook=TASK_AND_GATE, local=replace(LOCAL, optimizer="adamw", weight_decay=0.1)),
        {},
    ),
    "ensemble with task gradient and learned gate": (
        replace(UEFL_METHOD, codebook=TASK_AND_GATE),
        {"ensemble_size": 2},
    ),
    "augmentation": (UEFL_METHOD, {"augment": "crop:2+flip"}),
    "loss that reads public images": (PublicLogitsLoss(**SHORT_RUN), {}),
    "fedprox with a codebook": (METHODS["fedprox"](**SHORT_RUN, codebook=ALWAYS_EXTENDED), {}),
    **{name: (make_short_method(METHODS[name]), {}) for name in OTHER_METHODS},
    "centralized with label priors": (METHODS["centralized"](**SHORT_RUN, logit_adjustment="local"), {}),
    **{
        f"extend={extend}": (
            UEFL(**{**SHORT_RUN, "iterations": 3}, codebook=replace(ALWAYS_EXTENDED, extend=extend)),
            {},
        )
        for extend in get_args(Extend)
        if extend not in ("none", "uncertain")  # vq-fedavg and all of the above
    },
    "vq-fedavg": (METHODS["vq-fedavg"](**SHORT_RUN, codebook=replace(ALWAYS_EXTENDED, extend="none")), {}),
}


@pytest.mark.parametrize("setup", SETUPS)
def test_agrees_with_the_serial_engine(setup):
    method, fields = SETUPS[setup]
    fields = dict(fields)
    stacked_engine = partial(StackedEngine, max_stack_size=fields.pop("max_stack_size", 0))
    stacked, records = run_rounds(method, make_engine(method, dtype=torch.float64, engine=stacked_engine, **fields))
    serial, serial_records = run_rounds(method, make_engine(method, dtype=torch.float64, **fields))
    assert stacked.model_state.keys() == serial.model_state.keys()
    assert torch.equal(stacked.access, serial.access)
    assert "codebook" not in setup or stacked.access.shape[1] > 6, "the run must extend the codebook"
    assert_close(stacked.model_state, serial.model_state)
    differences = [find_difference(a, b) for a, b in zip(records, serial_records, strict=True)]
    assert differences == [""] * len(serial_records)


def fail_to_compile(*_: Any) -> Any:
    raise RuntimeError("this backend compiles nothing")


@pytest.mark.parametrize(
    ("setup", "backend", "rounds"),
    [
        ("fedprox with a codebook", "aot_eager", 5),
        ("codebook with task gradient and learned gate", "aot_eager", 5),
        *((name, "aot_eager", 2) for name in (*OTHER_METHODS, "centralized with label priors")),
        ("loss that reads public images", "aot_eager", 2),
        ("local batch norm", fail_to_compile, 2),
    ],
)
def test_compiled_code_agrees_and_eager_code_replaces_what_does_not_compile(setup, backend, rounds, monkeypatch):
    """Silos alternate between numbers of codewords, FedIIR differentiates a gradient, VHL depends on the epoch."""
    monkeypatch.setattr("uefl.engines.stacked.compiler.COMPILE_BACKEND", backend)
    torch._dynamo.reset()
    method, _ = SETUPS[setup]
    compiled_engine = partial(StackedEngine, max_stack_size=1, use_compiler=True)
    # Batches of 8 and of 5 examples: every length is compiled anew.
    silos = [make_striped_silo(n, k, 10 * i) for i, (n, k) in enumerate({"ada": 16, "bob": 21, "cyd": 8}.items())]
    engine = make_engine(method, silos, dtype=torch.float64, engine=compiled_engine)
    compiled, _ = run_rounds(method, engine, rounds)
    serial, _ = run_rounds(method, make_engine(method, silos, dtype=torch.float64), rounds)
    assert_close(compiled.model_state, serial.model_state)
    buffers = engine._buffers.values()
    assert all(bool(b.uncompilable_losses) == (backend is fail_to_compile) for b in buffers)
    assert len(buffers) == (2 if "codebook" in setup else 1)


def test_codeword_gradients_of_compiled_code_equal_those_of_eager_code(monkeypatch):
    serial, _ = run_rounds(UEFL_METHOD, make_engine(UEFL_METHOD, dtype=torch.float64))
    torch._dynamo.reset()
    backward_operations: list[str] = []

    def keep_backward_graph(graph: Any, _inputs: Any) -> Any:
        backward_operations.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    backend = aot_autograd(fw_compiler=lambda graph, _inputs: graph, bw_compiler=keep_backward_graph)
    monkeypatch.setattr("uefl.engines.stacked.compiler.COMPILE_BACKEND", backend)
    compiled_engine = partial(StackedEngine, max_stack_size=1, use_compiler=True)
    clients = make_engine(UEFL_METHOD, dtype=torch.float64, engine=compiled_engine)
    server, _ = run_rounds(UEFL_METHOD, clients)
    assert_close(server.model_state, serial.model_state)
    assert "uefl.sum_by_codeword.default" in backward_operations
    assert not any(buffers.uncompilable_losses for buffers in clients._buffers.values())


@pytest.mark.parametrize("name", ["uefl", "scaffold", "fedcr", "fedsr", "pmfl", "fccl", "fine-tuning", "ditto"])
def test_client_states_are_the_same_on_both_engines(name):
    method = make_short_method(METHODS[name])
    stacked, serial = (make_engine(method, dtype=torch.float64, engine=e) for e in (StackedEngine, SerialEngine))
    run_rounds(method, stacked), run_rounds(method, serial)
    assert stacked.client_states.keys() == serial.client_states.keys()
    for silo_name, client_state in serial.client_states.items():
        assert stacked.client_states[silo_name].keys() == client_state.keys()
        assert_close(stacked.client_states[silo_name], client_state)


def test_single_precision_agrees_after_one_round():
    method = replace(UEFL_METHOD, codebook=replace(ALWAYS_EXTENDED, warmup_rounds=0))
    stacked, _ = run_rounds(method, make_engine(method, engine=StackedEngine), 1)
    serial, _ = run_rounds(method, make_engine(method), 1)
    assert_close(stacked.model_state, serial.model_state, 1e-5)


def test_batches_of_different_lengths_are_never_padded():
    sizes = {"a": 8, "b": 9, "c": 16, "d": 17, "e": 3, "f": 16}
    silos = [make_striped_silo(n, k, 10 * i) for i, (n, k) in enumerate(sizes.items())]
    stacked, _ = run_rounds(UEFL_METHOD, make_engine(UEFL_METHOD, silos, dtype=torch.float64, engine=StackedEngine))
    serial, _ = run_rounds(UEFL_METHOD, make_engine(UEFL_METHOD, silos, dtype=torch.float64))
    assert_close(stacked.model_state, serial.model_state)


@dataclass(frozen=True, kw_only=True)
class EverySilo(FedAvg):
    """Silos without training examples take part too, in every other round they alone."""

    def select_participants(self, clients: Any, server: ServerState) -> tuple[str, ...]:
        return tuple(n for n, size in clients.num_examples.items() if server.round % 2 or not size)


@pytest.mark.parametrize("max_stack_size", [0, 1])
def test_silos_without_training_examples_take_no_step(max_stack_size):
    no_examples = make_striped_examples(0, 0)
    silos = [replace(silo, train=no_examples) if silo.name < "c" else silo for silo in make_striped_silos()]
    method, engine = EverySilo(**SHORT_RUN), partial(StackedEngine, max_stack_size=max_stack_size)
    stacked, records = run_rounds(method, make_engine(method, silos, dtype=torch.float64, engine=engine), 2)
    serial, serial_records = run_rounds(method, make_engine(method, silos, dtype=torch.float64), 2)
    assert_close(stacked.model_state, serial.model_state)
    assert [find_difference(a, b) for a, b in zip(records, serial_records, strict=True)] == [""] * len(records)


def test_batched_permutations_equal_single_ones():
    sizes = [5, 9, 1, 140_000]  # the last one is drawn in blocks
    keys = [derive_key("order", i) for i in range(4)]
    orders = batched_permutations(torch.tensor(keys), sizes)
    for key, n, order in zip(keys, sizes, orders):
        assert torch.equal(order[:n], permutation(key, n))


@pytest.mark.parametrize("place", ["stack_clients", "_train_stack", "_query_stack", "pack_tensors", "find_finite_rows"])
def test_silos_that_do_not_fit_are_split_wherever_memory_ends(place, monkeypatch):
    """Silos have a state of their own, which a step that is repeated must find as it was."""
    method = replace(make_short_method(METHODS["scaffold"]), batch_norm="personal")
    fields: Any = {"encoder_factory": make_encoder, "dtype": torch.float64}
    expected, _ = run_rounds(method, make_clients(method, engine=StackedEngine, **fields))
    warnings: list[str] = []
    clients = make_clients(method, engine=partial(StackedEngine, on_warning=warnings.append), **fields)
    owner = StackedEngine if place.startswith("_") else stacked_engine
    original = getattr(owner, place)

    def fail_if_large(*args, **fields):
        if max(map(count_silos, args)) > 2:
            raise torch.OutOfMemoryError("simulated")
        return original(*args, **fields)

    monkeypatch.setattr(owner, place, fail_if_large)
    server, _ = run_rounds(method, clients)
    assert warnings == ["4 silos at a time do not fit into the memory of cpu; the run continues with 2 at a time."]
    torch.testing.assert_close(server.model_state, expected.model_state)


def count_silos(argument):
    """Return the silos of a stack, of its buffers or its tensors, or of a list of clients; 0 for something else."""
    if isinstance(argument, ClientStack | DeviceBuffers):
        return len(getattr(argument, "stack", argument).silo_names)
    is_stacked = isinstance(argument, dict) and all(isinstance(t, torch.Tensor) for t in argument.values())
    return len(next(iter(argument.values()))) if is_stacked else len(argument) if isinstance(argument, list) else 0


def test_a_stack_that_cannot_be_made_is_split_also_after_a_stack_of_one_silo(monkeypatch):
    """Silos with other codewords are a stack of their own."""
    method, fields = make_short_method(FedAvg), {"encoder_factory": make_encoder, "dtype": torch.float64}
    expected, _ = run_rounds(method, make_clients(method, engine=StackedEngine, **fields))
    warnings: list[str] = []
    clients = make_clients(method, engine=partial(StackedEngine, on_warning=warnings.append), **fields)
    get_shapes, stack_clients = ReceivedClient.shapes, stacked_engine.stack_clients

    def fail_if_large(received, **fields):
        if len(received) > 2:
            raise torch.OutOfMemoryError("simulated")
        return stack_clients(received, **fields)

    first = max(clients.silos, key=lambda name: len(clients.silos[name].train.y))
    monkeypatch.setattr(ReceivedClient, "shapes", lambda c: (*get_shapes(c), ("other", (int(c.name == first),))))
    monkeypatch.setattr(stacked_engine, "stack_clients", fail_if_large)
    server, _ = run_rounds(method, clients)
    assert warnings == ["3 silos at a time do not fit into the memory of cpu; the run continues with 2 at a time."]
    torch.testing.assert_close(server.model_state, expected.model_state)


def test_the_images_of_an_engine_are_freed_as_soon_as_nothing_refers_to_it():
    """On a GPU, those of the next run might not fit beside them until the garbage collection."""
    method = make_short_method(FedAvg)
    clients = make_clients(method, engine=StackedEngine)
    run_rounds(method, clients, 2)
    clients.release()
    data = weakref.ref(clients._data)
    gc.disable()
    try:
        del clients
        assert data() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("place", ["_load_stack", "_move_examples"])
def test_images_that_do_not_fit_are_an_input_error(place, monkeypatch):
    def fail(*_args):
        raise torch.OutOfMemoryError("simulated")

    monkeypatch.setattr(StackedEngine, place, fail)
    with pytest.raises(InputError, match="images do not fit into the memory of cpu; use lazy=true, or fewer images"):
        make_clients(make_short_method(FedAvg), engine=StackedEngine)


def test_images_that_are_read_from_a_file_train_a_network_in_double_precision():
    x, y = make_striped_examples(24, 0)
    silos = [Silo.from_tensors(name, x + shift, y, lazy=True) for name, shift in (("a", 0.0), ("b", 0.5))]
    method = FedAvg(**SHORT_RUN)
    servers = []
    for engine in (SerialEngine, StackedEngine):
        server, _ = run_rounds(method, make_engine(method, silos, dtype=torch.float64, engine=engine))
        servers.append(server)
    assert_close(servers[1].model_state, servers[0].model_state)


def test_a_network_with_torch_dropout_raises_an_input_error():
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.1))
    with pytest.raises(InputError, match="engine=serial"):
        make_clients(FedAvg(**SHORT_RUN), engine=StackedEngine, encoder_factory=lambda: encoder)


def assert_close(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-9) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=tolerance, atol=tolerance)


def find_difference(one: Any, other: Any, path: str = "") -> str:
    """Return where two records differ except in times, or nothing."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{path} {sorted(one.keys() ^ other.keys())}"
        differences = [find_difference(one[n], other[n], f"{path}/{n}") for n in one if "seconds" not in n]
        return next((d for d in differences if d), "")
    if isinstance(one, list) and isinstance(other, list):
        return find_difference(*({str(i): x for i, x in enumerate(values)} for values in (one, other)), path)
    if isinstance(one, float) and isinstance(other, float):
        return "" if math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9) else f"{path} {one} {other}"
    return "" if one == other else f"{path} {one} {other}"
