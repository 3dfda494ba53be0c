"""`uefl deploy`: a federation across machines, on Flower."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from uefl.errors import InputError

app = typer.Typer(help="Run a federation across machines, on Flower.", no_args_is_help=True)
NEEDED = "this needs Flower: pip install 'uefl[flower]'"


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="new folder to write into")],
    silos: Annotated[list[str], typer.Argument(help="the silos' names, such as north south west")],
    address: Annotated[str, typer.Option(help="host name or address at which silos reach the coordinator")],
    port: Annotated[int, typer.Option(help="port of the coordinator, the only one to open")] = 8443,
    name: Annotated[str, typer.Option(help="of the federation")] = "federation",
) -> None:
    """Write certificates, keys, configuration, start scripts and systemd units for a new federation."""
    try:
        from uefl.flower import deploy
    except ImportError:
        raise InputError(NEEDED) from None
    deploy.init(folder, silos, address=address, port=port, name=name)
    console = Console()
    console.print(f"written: {folder}", soft_wrap=True)
    console.print(f"coordinator: {folder / 'coordinator'}: superlink.sh, register.sh, then run.sh", soft_wrap=True)
    for silo in silos:
        console.print(f"{silo}: {folder / 'silos' / silo}: images into data/, then supernode.sh", soft_wrap=True)
    console.print("Hand each silo its own folder only, and keep authority/ca.key off the network.")


@app.command()
def check(file: Annotated[Path, typer.Argument(help="federation.toml of a coordinator")]) -> None:
    """Look for mistakes in what the coordinator is to run; run.sh does it before it starts anything."""
    try:
        from uefl.flower import deploy
    except ImportError:
        raise InputError(NEEDED) from None
    deploy.check(file)


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(help="new folder to write into")] = Path("runs/deploy-demo"),
) -> None:
    """Three silos on this machine over TLS, each with its own folder of digits; nothing is left running."""
    try:
        from uefl.flower.demo import demo as run
    except ImportError:
        raise InputError(NEEDED) from None
    run(folder.resolve(), Console())
