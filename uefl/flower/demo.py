"""`uefl deploy demo`: three silos on this machine, each with its own folder of digits, over TLS with keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from rich.console import Console

from uefl.data import defaults
from uefl.data.share import shuffled
from uefl.data.shifts import shifted
from uefl.data.sources import read
from uefl.errors import Stopped
from uefl.flower.deploy import init
from uefl.flower.loopback import Loopback, free_port, loopback
from uefl.run import SUMMARY

SILOS = {"north": "rotate:0", "south": "rotate:-50", "west": "rotate:120"}
SETTINGS = (
    "rounds=3 extra_rounds=2 iterations=2 warm_up=1 words=32 gamma=0 errors=0 "
    "width=8 hidden=64 local.rate=2e-3 local.batch=32 local.epochs=2 passes=10"
)


def demo(folder: Path, console: Console) -> Path:
    """Write a federation, start it, run it, show what it says, stop it; returns the run's folder."""
    port = free_port()
    init(folder, list(SILOS), address="127.0.0.1", port=port, name="demo")
    for silo, shift in SILOS.items():
        digits(folder / "silos" / silo / "data", shift, list(SILOS).index(silo))
    configured(folder, SETTINGS)
    with loopback(folder, port) as processes:
        started(processes, list(SILOS), console)
        for line in processes.lines():
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    (run, *_) = [*folder.glob(f"coordinator/runs/*/{SUMMARY}"), None]
    if run is None:
        raise Stopped(f"the run did not end well; see {folder / 'logs'}")
    console.print(f"all processes stopped; everything lies in {folder}", soft_wrap=True)
    return run.parent


def started(processes: Loopback, silos: Sequence[str], console: Console) -> None:
    """SuperLink, keys, SuperNodes, in this order."""
    processes.superlink()
    console.print(f"SuperLink listens at 127.0.0.1:{processes.port}, TLS, only registered keys")
    processes.register()
    for silo in silos:
        processes.supernode(silo)
        console.print(
            f"SuperNode of {silo} started, data in {processes.folder / 'silos' / silo / 'data'}", soft_wrap=True
        )


def configured(folder: Path, settings: str, **fields: object) -> None:
    """Change what the coordinator will run."""
    path = folder / "coordinator" / "federation.toml"
    lines = [line for line in path.read_text().splitlines() if not line.startswith(("settings", *fields))]
    more = [f"{name} = {value!r}".replace("'", '"') for name, value in fields.items()]
    path.write_text("\n".join([*lines, f'settings = "{settings}"', *more]) + "\n")


def digits(folder: Path, shift: str, number: int, count: int = 300) -> None:
    """A silo's own images: embedded digits under its shift, as <class>/<number>.png."""
    images = read(defaults("mnist5k").name)
    at = shuffled(images, 0)[number * count : (number + 1) * count]
    for i, x in zip(at.tolist(), shifted(images.x[at], shift, 0, at)):
        place = folder / images.classes[int(images.y[i])]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[0].numpy()).save(place / f"{i}.png")
