"""Contenders do the same work: from the same weights, clients and batches, to the same weights."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from harness import import_or_skip
from safetensors.torch import load_file

from benchmarks.digits import load_digits, make_silos
from benchmarks.frameworks import compare_weights
from benchmarks.harness import ROOT
from benchmarks.peers import clients_file, clients_uefl, run_uefl
from benchmarks.peers.clients_file import CLIENTS_PER_ROUND, write_clients
from benchmarks.peers.workload import draw_order, load_workload, save_silos

NUM_ROUNDS = 2


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("work") / "silos.safetensors"
    save_silos(make_silos(load_digits(), 2, 40, 8), path)
    return path


def set_arguments(monkeypatch, file, precision):
    out = file.with_name("weights.safetensors")
    monkeypatch.setattr(sys, "argv", ["program", str(file), str(NUM_ROUNDS), precision, str(out)])
    return lambda: [tensor.clone() for _, tensor in sorted(load_file(out).items())]


def run_ours(monkeypatch, file, precision="float64"):
    read_weights = set_arguments(monkeypatch, file, precision)
    run_uefl.main()
    return read_weights()


@pytest.fixture
def ours(monkeypatch, file):
    return run_ours(monkeypatch, file)


def test_our_weights_are_those_of_a_plain_loop(monkeypatch, file, ours):
    from benchmarks.peers import run_pytorch

    read_weights = set_arguments(monkeypatch, file, "float64")
    run_pytorch.main()
    assert compare_weights(read_weights(), ours) < 1e-12
    monkeypatch.setattr(run_pytorch, "draw_order", lambda silo, _round, n: draw_order(silo, 9, n))
    run_pytorch.main()
    assert compare_weights(read_weights(), ours) > 1e-4, "other batches are noticed"


def test_our_weights_are_those_of_pfl_up_to_its_float32_updates(monkeypatch, file, ours):
    pytest.importorskip("pfl", exc_type=ImportError)  # a peer, which only `make bench` installs
    from benchmarks.peers import run_pfl

    read_weights = set_arguments(monkeypatch, file, "float64")
    run_pfl.main()
    assert 0 < compare_weights(read_weights(), ours) < 1e-6


def test_two_workers_of_pfl_train_each_of_three_silos_once_per_round(monkeypatch, tmp_path):
    pytest.importorskip("pfl", exc_type=ImportError)
    from benchmarks.peers import run_pfl

    file = tmp_path / "silos.safetensors"
    save_silos(make_silos(load_digits(), 3, 40, 8), file)
    read_weights = set_arguments(monkeypatch, file, "float64")
    run_pfl.main()
    of_one_worker = read_weights()
    launcher = ["torch.distributed.run", "--nproc_per_node", "2", "-m", "benchmarks.peers.run_pfl"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", *launcher, *sys.argv[1:]], check=True, cwd=ROOT, env=environment)
    assert compare_weights(read_weights(), of_one_worker) < 1e-7


class PlainGrid:
    """The part of Flower's `Grid` that a strategy uses; it calls the client app in this process, without Ray."""

    def __init__(self, app, num_nodes):
        self.app, self.num_nodes = app, num_nodes

    def get_node_ids(self):
        return range(1, self.num_nodes + 1)

    def send_and_receive(self, messages, *, timeout=None):
        del timeout
        return [self.answer(message) for message in messages]

    def answer(self, message):
        context = SimpleNamespace(node_config={"partition-id": message.metadata.dst_node_id - 1})
        task = self.app.fit if message.metadata.message_type == "train" else self.app.evaluate
        return task(message, context)


def test_our_weights_are_those_of_flower(monkeypatch, file, ours):
    import_or_skip("flwr.supercore.task_identity")
    from flwr.supercore.task_identity import TaskIdentity

    from benchmarks.peers import run_flower

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # the sender of messages
    read_weights = set_arguments(monkeypatch, file, "float64")
    run_flower.main(PlainGrid(run_flower, len(load_workload(str(file)).x)), None)
    assert compare_weights(read_weights(), ours) < 1e-12


def test_a_lower_precision_is_noticed(monkeypatch, file, ours):
    single = run_ours(monkeypatch, file, "float32")
    assert single[0].dtype == torch.float32
    assert 1e-9 < compare_weights(single, ours) < 1e-2


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    path = tmp_path_factory.mktemp("many") / "clients.safetensors"
    write_clients(path, CLIENTS_PER_ROUND + 10, "mnist5k", NUM_ROUNDS)
    return path


def run_with_many_clients(monkeypatch, path, main):
    out = path.with_name("weights.safetensors")
    monkeypatch.setattr(sys, "argv", ["program", str(path), str(NUM_ROUNDS), "float64", str(out), "0"])
    main()
    return [tensor.clone() for _, tensor in sorted(load_file(out).items())]


@pytest.fixture(scope="module")
def ours_of_many(clients):
    with pytest.MonkeyPatch.context() as monkeypatch:
        return run_with_many_clients(monkeypatch, clients, clients_uefl.main)


def test_the_clients_of_a_round_are_drawn_without_replacement_and_differ_between_rounds(clients):
    first, second = clients_file.open_clients(str(clients), "float64").schedule.participants.tolist()
    assert len({*first}) == len({*second}) == CLIENTS_PER_ROUND
    assert first != second


def test_with_many_clients_our_weights_are_those_of_pfl_up_to_its_float32_updates(monkeypatch, clients, ours_of_many):
    pytest.importorskip("pfl", exc_type=ImportError)
    from benchmarks.peers import clients_pfl

    assert compare_weights(run_with_many_clients(monkeypatch, clients, clients_pfl.main), ours_of_many) < 1e-6


def test_with_many_clients_our_weights_are_those_of_flower(monkeypatch, capsys, clients, ours_of_many):
    import_or_skip("flwr.supercore.task_identity")
    from flwr.supercore.task_identity import TaskIdentity

    from benchmarks.peers import clients_flower

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

    def run_flower():
        grid = PlainGrid(clients_flower, CLIENTS_PER_ROUND + 10)
        return run_with_many_clients(monkeypatch, clients, lambda: clients_flower.main(grid, None))

    assert compare_weights(run_flower(), ours_of_many) < 1e-12
    assert 0 < float(re.search(r"accuracy (\S+)", capsys.readouterr().out)[1]) < 1

    load = clients_file.ClientsFile.load_train
    monkeypatch.setattr(clients_file.ClientsFile, "load_train", lambda *address: [t.flip(0) for t in load(*address)])
    assert compare_weights(run_flower(), ours_of_many) > 1e-3, "other batches are noticed"
