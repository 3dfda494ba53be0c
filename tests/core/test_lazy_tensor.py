"""Lazy inputs: they read nothing before they are used, and give what a tensor gives."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import have_equal_bits, make_clients, make_method, make_striped_silos, run_rounds

from uefl.core.errors import InputError
from uefl.core.federation import Silo, map_examples
from uefl.core.lazy_tensor import LazyTensor, is_lazy, load_inputs
from uefl.engines.serial import SerialEngine
from uefl.engines.stacked.stacked_engine import StackedEngine
from uefl.experiment.train import train


class CountedRows:
    """Rows of a tensor, and the positions at which they were read."""

    def __init__(self, x):
        self.x, self.reads = x, []
        self.lazy = LazyTensor(self.read, x.shape, x.dtype)

    def read(self, positions):
        self.reads.append(positions.tolist())
        return self.x[positions]


@pytest.fixture
def rows():
    return CountedRows(torch.arange(24.0).reshape(6, 2, 2))


def test_shape_type_and_selection_read_nothing(rows):
    selected = rows.lazy.select(torch.tensor([5, 0, 2])).map(lambda x: x.double() + 1, torch.float64)
    assert (selected.shape, selected.dtype, selected.dim(), len(selected)) == ((3, 2, 2), torch.float64, 3, 3)
    assert not rows.reads
    assert torch.equal(selected.load(), rows.x[[5, 0, 2]].double() + 1)
    assert rows.reads == [[5, 0, 2]]


@pytest.mark.parametrize("index", [2, -1, slice(1, 4), torch.tensor([3, 3, 0]), torch.tensor([True, False] * 3)])
def test_an_index_reads_what_it_selects(rows, index):
    assert torch.equal(rows.lazy[index], rows.x[index])
    assert len(rows.reads[0]) == len(torch.atleast_1d(torch.arange(6)[index]))


def test_functions_and_methods_of_torch_read_all(rows):
    assert torch.equal(torch.cat([rows.lazy, rows.lazy]), torch.cat([rows.x, rows.x]))
    assert torch.equal(rows.lazy.flatten(1), rows.x.flatten(1))
    assert float(rows.lazy.mean()) == float(rows.x.mean())


def make_lazy(silo, reads):
    def change(examples):
        counted = CountedRows(examples.x)
        reads.setdefault(silo.name, []).append(counted.reads)
        return examples._replace(x=counted.lazy)

    return map_examples(silo, change)


@pytest.mark.parametrize("engine", [SerialEngine, StackedEngine])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedcr"])
def test_lazy_silos_train_to_the_same_bits_and_only_participants_are_read(engine, name):
    method = make_method(name, rounds=1, iterations=1, clients_per_round=1, eval_clients=1)
    expected, _ = run_rounds(method, make_clients(method, engine=engine))
    reads = {}
    silos = [make_lazy(silo, reads) for silo in make_striped_silos()]
    server, records = run_rounds(method, make_clients(method, silos, engine=engine))
    assert have_equal_bits(server.model_state, expected.model_state)
    used = {name for record in records for name in record["silos"]} | {"ada"}  # the first one shows the form
    read = {name for name, of_splits in reads.items() if any(of_splits)}
    assert read <= used
    assert used < set(reads) or name == "fedcr", "all silos take part in the last round of FedCR, and only there"


def write_pixels(path, count=90):
    pixels = np.memmap(path, np.uint8, "w+", shape=(count, 1, 8, 8))
    pixels[:] = np.random.default_rng(0).integers(0, 256, pixels.shape)
    pixels.flush()
    return np.memmap(path, np.uint8, "r", shape=(count, 1, 8, 8)), np.arange(count) % 3


def test_silos_of_a_mapped_file_train_as_silos_in_memory(tmp_path):
    pixels, labels = write_pixels(tmp_path / "pixels")
    method, encoder = make_method("fedavg", iterations=1), torch.nn.Flatten()
    results = []
    for lazy in (False, True):
        rows = [slice(0, 30), slice(30, 60), slice(60, 90)]
        silos = [Silo.from_tensors(str(i), pixels[r], labels[r], lazy=lazy) for i, r in enumerate(rows)]
        assert is_lazy(silos[0].train.x) == lazy
        assert load_inputs(silos[0].train.x).dtype == torch.float32, "pixels are scaled"
        results.append(train(method, silos, encoder, num_classes=3, hidden_size=8))
    one, other = results
    assert have_equal_bits(one.server.model_state, other.server.model_state)
    assert one.accuracy == other.accuracy


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process as Linux gives it")
def test_pages_of_a_mapped_file_are_given_back(tmp_path):
    def read_file_memory():
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("RssFile"))) / 1024

    with (tmp_path / "pixels").open("wb") as file:
        file.write(np.random.default_rng(0).bytes(64 * 2**20))
    pixels = np.memmap(tmp_path / "pixels", np.uint8, "r", shape=(64, 1, 1024, 1024))
    before, mapped = read_file_memory(), LazyTensor.from_array(pixels)
    assert int(pixels.sum(dtype=np.int64)) > 0
    assert read_file_memory() - before > 50, "the measurement notices pages in memory"
    sums = [int(mapped[i : i + 8].sum(dtype=torch.int64)) for i in range(0, 64, 8)]
    assert sum(sums) == int(pixels.sum(dtype=np.int64))
    mapped[:1]
    assert read_file_memory() - before < 10


def test_a_lazy_value_that_is_not_finite_is_an_input_error_when_it_is_read():
    x = torch.zeros(20, 4)
    x[7, 1] = float("nan")
    silo = Silo.from_tensors("north", x, torch.arange(20) % 2, lazy=True)
    with pytest.raises(InputError, match=r"silo north: x\[\d+\] contains nan; all values must be finite"):
        torch.cat([silo.train.x, silo.validation.x, silo.test.x])


def test_lazy_inputs_of_a_wrong_shape_are_an_input_error_at_once():
    with pytest.raises(InputError, match=r"x has shape \[20\]"):
        Silo.from_tensors("north", torch.zeros(20), torch.arange(20) % 2, lazy=True)
