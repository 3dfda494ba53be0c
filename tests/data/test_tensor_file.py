"""The data set `tensors`: silos of one mapped file, without reading the file."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from harness import call_cli, call_with_mistake, have_equal_bits
from safetensors.torch import load_file, save_file

from uefl.core.lazy_tensor import is_lazy, load_inputs
from uefl.data.config import DataConfig
from uefl.data.sources import read_images
from uefl.experiment.experiment import fingerprint_silos

SETTINGS = {"name": "tensors", "partitioner": "natural", "shifts": (), "num_silos": (), "train_per_silo": 0}


def write_file(path, num_silos=3, size=20, **changes):
    n = num_silos * size
    pixels = np.random.default_rng(0).integers(0, 256, (n, 1, 8, 8), dtype=np.uint8)
    tensors = {"x": torch.from_numpy(pixels), "y": torch.arange(n) % 3, "silo": torch.arange(n) // size}
    save_file({name: t for name, t in {**tensors, **changes}.items() if t is not None}, path)
    return str(path)


def load_silos(path, **settings):
    return DataConfig(**{**SETTINGS, "path": path, "test_per_silo": 0, **settings}).load(0)[0]


def test_silos_have_the_images_of_the_file(tmp_path):
    path = write_file(tmp_path / "images.safetensors", num_silos=12)
    tensors, silos = load_file(path), load_silos(path)
    assert [silo.name for silo in silos] == [f"{i:02}" for i in range(12)]
    for number, silo in enumerate(silos):
        assert is_lazy(silo.train.x)
        parts = [load_inputs(e.x) for e in (silo.train, silo.validation, silo.test)]
        own = (tensors["x"][tensors["silo"] == number].float() / 255 - 0.5) / 0.25
        rows = {image.numpy().tobytes() for image in torch.cat(parts)}
        assert rows == {image.numpy().tobytes() for image in own}
        assert sum(map(len, parts)) == 20


def test_a_split_of_the_file_is_used(tmp_path):
    is_test = torch.arange(60) % 20 < 5
    silos = load_silos(write_file(tmp_path / "images.safetensors", is_test=is_test))
    assert [len(silo.test.y) for silo in silos] == [5, 5, 5]


def test_lazy_silos_of_any_images_have_the_same_pixels():
    config = DataConfig(train_per_silo=30, test_per_silo=10)
    (eager, _), (lazy, _) = config.load(0), DataConfig(train_per_silo=30, test_per_silo=10, lazy=True).load(0)
    for one, other in zip(eager, lazy, strict=True):
        assert is_lazy(other.train.x)
        assert not is_lazy(one.train.x)
        for split in ("train", "validation", "test"):
            assert torch.equal(one.examples(split).x, load_inputs(other.examples(split).x))
            assert other.examples(split).x.shape == one.examples(split).x.shape


def test_the_fingerprint_of_lazy_silos_notices_other_labels_and_other_pixels(tmp_path):
    base = fingerprint_silos(load_silos(write_file(tmp_path / "a.safetensors")))
    assert fingerprint_silos(load_silos(write_file(tmp_path / "b.safetensors"))) == base
    other_labels = write_file(tmp_path / "c.safetensors", y=(torch.arange(60) + 1) % 3)
    other_pixels = write_file(tmp_path / "d.safetensors", x=torch.zeros(60, 1, 8, 8, dtype=torch.uint8))
    assert fingerprint_silos(load_silos(other_labels)) != base
    assert fingerprint_silos(load_silos(other_pixels)) != base


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_a_run_of_the_command_line_resumes_to_the_same_bits(engine, tmp_path):
    path = write_file(tmp_path / "images.safetensors", num_silos=8)
    settings = ["run", "fedavg", "tensors", f"path={path}", "rounds=4", "iterations=1", "encoder=mlp", "width=8"]
    settings += ["hidden_size=8", "mc_samples=2", "epochs=1", "clients_per_round=3", "eval_clients=2", "dropout=0.1"]
    assert call_cli(*settings, "--out", str(tmp_path / "whole")).code == 0
    command = [sys.executable, "-m", "uefl.cli.main", *settings, "--out", str(tmp_path / "resumed")]
    stop = "import uefl.experiment.run as r, os\nsave = r.save_checkpoint\n"
    stop += "def stop(path, server, *rest):\n    save(path, server, *rest)\n    server.round == 2 and os._exit(9)\n"
    stop += f"r.save_checkpoint = stop\nimport sys\nsys.argv = {command[2:]!r}\n"
    stop += "from uefl.cli.main import main\nmain()\n"
    assert subprocess.run([sys.executable, "-c", stop], check=False).returncode == 9, "stopped after round 2"
    result = call_cli(*settings, "--out", str(tmp_path / "resumed"), "--engine", engine, "--workers", "2")
    assert result.code == 0
    assert "one after another" not in result.stdout + result.stderr, "mapped images are spread, too"
    (whole,), (resumed,) = ([*(tmp_path / name).glob("*/model.safetensors")] for name in ("whole", "resumed"))
    assert have_equal_bits(load_file(whole), load_file(resumed))
    records = [
        [json.loads(line) for line in (model.parent / "records.jsonl").read_text().splitlines()]
        for model in (whole, resumed)
    ]
    samples = [[sorted(n for n, s in r["silos"].items() if "accuracy" in s) for r in own] for own in records]
    assert samples[0] == samples[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": None}, "has no tensor y"),
        ({"x": torch.zeros(60, 1, 8, 8)}, r"x is F32 \[60, 1, 8, 8\]; it must be uint8"),
        ({"y": torch.zeros(60)}, r"y is torch.float32 \[60\]; it must be int64 \[60\]"),
        ({"y": torch.arange(60) - 1}, "y has -1 to 58; it must be 0 to 99999"),
        ({"silo": torch.zeros(9, dtype=torch.int64)}, r"silo is torch.int64 \[9\]; it must be int64 \[60\]"),
        ({"is_test": torch.zeros(60)}, r"is_test is torch.float32 \[60\]; it must be bool \[60\]"),
    ],
)
def test_a_file_of_another_form_is_one_line(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_images("tensors", write_file(tmp_path / "images.safetensors", **changes))


def test_other_files_and_tables_are_one_line(tmp_path):
    (tmp_path / "text.safetensors").write_text("no tensors")
    path = tmp_path / "text.safetensors"
    assert "not a safetensors file with x and y" in call_with_mistake("run", "fedavg", "tensors", f"path={path}")
    assert "needs a path: set path=<safetensors file>" in call_with_mistake("run", "fedavg", "tensors")
    assert "lazy has no effect" in call_with_mistake("run", "fedavg", "heart", "lazy=true")


MEASURE = """
import sys, torch
from pathlib import Path
from uefl.algorithms.fedavg import FedAvg
from uefl.core.local import LocalTraining
from uefl.data.config import DataConfig
from uefl.engines.serial import SerialEngine
from uefl.experiment.experiment import Experiment
from uefl.experiment.rounds import iterate_rounds
from uefl.models.model_config import ModelConfig

def read_memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) / 1024

path, loading = sys.argv[1:]
config = dict(name="tensors", path=path, partitioner="natural", shifts=(), num_silos=(), train_per_silo=0)
data = DataConfig(**config, test_per_silo=0)
method = FedAvg(rounds=3, iterations=1, clients_per_round=200, eval_clients=200, mc_samples=1,
                local=LocalTraining(epochs=1, batch_size=64))
experiment = Experiment(method=method, data=data, model=ModelConfig(encoder="mlp", width=8, hidden_size=8))
before = read_memory("VmRSS")
silos, _ = data.load(0)
if loading == "all":
    from uefl.core.federation import load_examples, map_examples
    silos = [map_examples(silo, load_examples) for silo in silos]
net = experiment.build_network((1, 28, 28), 10)
list(iterate_rounds(method, SerialEngine(silos, net)))
print(read_memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process as Linux gives it")
def test_memory_does_not_hold_the_images(tmp_path):
    num_silos, size = 400, 150
    n, path = num_silos * size, tmp_path / "images.safetensors"
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (n, 1, 28, 28), dtype=np.uint8))
    save_file({"x": pixels, "y": torch.arange(n) % 10, "silo": torch.arange(n) // size}, path)
    megabytes = {}
    for loading in ("lazy", "all"):
        process = subprocess.run(
            [sys.executable, "-c", MEASURE, str(path), loading], capture_output=True, text=True, check=True
        )
        megabytes[loading] = float(process.stdout)
    as_floats = pixels.numel() * 4 / 2**20
    assert megabytes["all"] > as_floats, "the measurement notices images in memory"
    # Most silos take part in these rounds, so pages of the file that stay would also exceed this.
    assert megabytes["lazy"] < 0.3 * as_floats, megabytes
