"""Faults with real processes: minutes each, so marked `real`."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from federating import driven
from rich.console import Console

from uefl.checkpoint import load_tensors
from uefl.engines import Serial
from uefl.flower.demo import configured, digits, started
from uefl.flower.deploy import init
from uefl.flower.loopback import Loopback, free_port, loopback
from uefl.flower.server import asked
from uefl.flower.silo import own

pytestmark = pytest.mark.real
SILOS = ["north", "south", "west"]
SMALL = "width=4 hidden=16 passes=2 local.batch=20 local.epochs=1 words=8 warm_up=1 gamma=0 errors=0 extra_rounds=1"


def federation(folder: Path, settings: str, port: int, **fields: object) -> Path:
    init(folder, SILOS, address="127.0.0.1", port=port)
    for i, silo in enumerate(SILOS):
        digits(folder / "silos" / silo / "data", f"rotate:{60 * i}", i, count=60)
    configured(folder, f"{SMALL} {settings}", **fields)
    return folder


def records(folder: Path) -> list[dict]:
    (path,) = folder.glob("coordinator/runs/*/records.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def background(processes: Loopback) -> threading.Thread:
    thread = threading.Thread(target=lambda: list(processes.lines()))
    thread.start()
    return thread


def until(condition, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)


def works(processes: Loopback, silo: str) -> bool:
    """Whether a silo's client process is at work."""
    family = processes._family(processes.processes[silo].pid)
    return any(b"flwr-clientapp" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family)


def test_a_killed_superlink_resumes_to_the_same_result(tmp_path):
    port = free_port()
    folder = federation(tmp_path / "f", "rounds=2 iterations=2 precision=float64", port)
    with loopback(folder, port) as processes:
        started(processes, SILOS, Console(quiet=True))
        run = background(processes)
        until(lambda: list(folder.glob("coordinator/runs/*/checkpoint.safetensors")))
        processes.kill("superlink")
        processes.kill("run")
        run.join()
        processes.superlink()
        said = "\n".join(processes.lines())
    assert "goes on after round" in said
    assert [record["round"] for record in records(folder)] == [1, 2, 3]
    (model,) = folder.glob("coordinator/runs/*/model.safetensors")
    tensors, about = load_tensors(model)
    config = {"method": "uefl", "data": "folder", "seed": 0, "preset": "default"}
    what = asked({**config, "settings": f"{SMALL} rounds=2 iterations=2 precision=float64"})["uefl"]
    silos = [own(what, str(folder / "silos" / name / "data"), name).silo for name in SILOS]
    net = what.network(tuple(about["shape"]), len(about["classes"]))
    server, _ = driven(Serial(silos, net, seed=0, dtype=torch.float64), what)
    for name, tensor in server.state.items():
        assert torch.allclose(tensors[f"state/{name}"], tensor, rtol=0, atol=1e-9), name


def test_a_killed_supernode_is_missing_and_rejoins(tmp_path):
    port = free_port()
    folder = federation(tmp_path / "f", "rounds=7 iterations=1", port, method="vq-fedavg")
    with loopback(folder, port) as processes:
        started(processes, SILOS, Console(quiet=True))
        run = background(processes)
        until(lambda: list(folder.glob("coordinator/runs/*/checkpoint.safetensors")))
        until(lambda: works(processes, "west"))
        processes.kill("west")
        while run.is_alive():  # what systemd does: SuperLink lets a killed node in again only after a minute
            if "west" not in processes.processes or processes.processes["west"].poll() is not None:
                processes.supernode("west")
            time.sleep(5)
        run.join()
    refused = [record["silos"]["west"].get("refused", "") for record in records(folder)]
    assert any("missing" in why for why in refused)
    assert refused[-1] == "", "it did not come back"
    assert all("refused" not in record["silos"]["north"] for record in records(folder))


def test_strangers_are_refused(tmp_path):
    port = free_port()
    folder = init(tmp_path / "f", ["north", "south"], address="127.0.0.1", port=port)
    init(tmp_path / "other", ["north"], address="127.0.0.1", port=port)
    (folder / "coordinator/keys/south.pub").unlink()  # never registered
    place = folder / "silos/south"
    shutil.copy(tmp_path / "other/silos/north/ca.crt", place / "other.crt")
    script = (place / "supernode.sh").read_text()
    key, trust = "--auth-supernode-private-key key ", "--root-certificates ca.crt"
    ways = {  # what is changed in a good script, and what the coordinator's log says then
        "unknown key": ({}, "[ApiError:2004]"),
        "no key": ({key: ""}, "[ApiError:2001]"),
        "wrong authority": (
            {trust: "--root-certificates other.crt"},
            "handshake failed: [SSL: TLSV1_ALERT_UNKNOWN_CA]",
        ),
        "plain text": ({trust: "--insecure", key: ""}, "handshake failed: [SSL: HTTP_REQUEST]"),
    }
    with loopback(folder, port) as processes:
        processes.superlink()
        processes.register()
        for name, (changes, why) in ways.items():
            changed, text = place / f"{name.replace(' ', '-')}.sh", script
            for old, new in changes.items():
                assert old in text
                text = text.replace(old, new)
            changed.write_text(text)
            changed.chmod(0o755)
            assert why not in processes.log("superlink")
            processes.start(name, changed, {"UEFL_PORT": str(free_port())})
            until(lambda why=why: why in processes.log("superlink"), 60)
            processes.kill(name)  # a node in plain text would try for ever
        assert "ActivateNode] Activated" not in processes.log("superlink"), "somebody was let in"


def test_a_silo_with_an_empty_folder_says_why_and_the_others_go_on(tmp_path):
    port = free_port()
    folder = federation(tmp_path / "f", "rounds=2 iterations=1", port, method="vq-fedavg", wait=60.0)
    shutil.rmtree(folder / "silos/west/data")
    (folder / "silos/west/data").mkdir()
    with loopback(folder, port) as processes:
        started(processes, SILOS, Console(quiet=True))
        said = "\n".join(processes.lines())
    assert "silo west cannot take part" in said
    assert [sorted(record["silos"]) for record in records(folder)] == [["north", "south"]] * 2
