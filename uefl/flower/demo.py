"""`uefl deploy demo`: three silos on this machine over TLS with keys, each with its own folder of digits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from rich.console import Console

from uefl.core.errors import ResumableError
from uefl.data.partitioners.partition import shuffle_indices
from uefl.data.shifts import apply_shift
from uefl.data.sources import read_images
from uefl.experiment.run_folder import RunFolder
from uefl.flower.deployment import write_deployment
from uefl.flower.local_processes import LocalFederation, find_free_port, open_local_federation

SILO_SHIFTS = {"north": "rotate:0", "south": "rotate:-50", "west": "rotate:120"}
SETTINGS = (
    "rounds=3 extra_rounds=2 iterations=2 warmup_rounds=1 num_codewords=32 gamma=0 min_standard_errors=0 "
    "width=8 hidden_size=64 local.lr=2e-3 local.batch_size=32 local.epochs=2 mc_samples=10"
)


def run_demo(folder: Path, console: Console) -> Path:
    """Write a federation, start its processes, show the output of a run and stop them; return the run folder."""
    port = find_free_port()
    write_deployment(folder, list(SILO_SHIFTS), address="127.0.0.1", port=port, federation_name="demo")
    for i, (silo, shift) in enumerate(SILO_SHIFTS.items()):
        write_digits(folder / "silos" / silo / "data", shift, i)
    write_run_settings(folder, SETTINGS)
    with open_local_federation(folder, port) as processes:
        start_processes(processes, list(SILO_SHIFTS), console)
        for line in processes.stream_run_output():
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    summaries = list(folder.glob(f"coordinator/runs/*/{RunFolder.SUMMARY_FILE}"))
    if not summaries:
        raise ResumableError(f"the run failed; see the logs in {folder / 'logs'}")
    console.print(f"All processes have stopped. All files are in {folder}.", soft_wrap=True)
    return summaries[0].parent


def start_processes(processes: LocalFederation, silos: Sequence[str], console: Console) -> None:
    """Start the coordinator, register the keys, and start the nodes, in this order."""
    processes.start_coordinator()
    console.print(f"The guard listens at 127.0.0.1:{processes.ports[0]} over TLS and accepts registered silos only")
    processes.register_keys()
    for silo in silos:
        processes.start_node(silo)
        data_folder = processes.folder / "silos" / silo / "data"
        console.print(f"Node of {silo} started with the data in {data_folder}", soft_wrap=True)


def write_run_settings(folder: Path, settings: str, **fields: object) -> None:
    """Change settings and other fields of the coordinator's run configuration."""
    path = folder / "coordinator" / "federation.toml"
    lines = [line for line in path.read_text().splitlines() if not line.startswith(("settings", *fields))]
    new_lines = [f"{name} = {value!r}".replace("'", '"') for name, value in fields.items()]
    path.write_text("\n".join([*lines, f'settings = "{settings}"', *new_lines]) + "\n")


def write_digits(folder: Path, shift: str, silo_index: int, num_images: int = 300) -> None:
    """Write a silo's images: embedded digits under its shift, as <class>/<index>.png."""
    images = read_images("mnist5k")
    indices = shuffle_indices(images, 0)[silo_index * num_images : (silo_index + 1) * num_images]
    for i, x in zip(indices.tolist(), apply_shift(images.x[indices], shift, 0, indices)):
        class_folder = folder / images.classes[int(images.y[i])]
        class_folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[0].numpy()).save(class_folder / f"{i}.png")
