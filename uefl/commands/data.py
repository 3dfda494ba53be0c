"""`uefl data`: look at silos before training on them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from uefl.commands.flags import SkipBad, Strict, flagged
from uefl.data import defaults
from uefl.data.concerns import concerns
from uefl.data.show import counts, picture
from uefl.settings import override

app = typer.Typer(help="Look at images and silos.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Look at images and silos."""


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="data set, such as mnist5k")],
    assignments: Annotated[
        list[str] | None, typer.Argument(metavar="[FIELD=VALUE]...", help="cut=vhl alpha=0.3")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="picture to write; an existing file is never overwritten")] = None,
    seed: Annotated[int, typer.Option(help="seed of the cut")] = 0,
    skip_bad: SkipBad = False,
    strict: Strict = False,
) -> None:
    """Cut a data set into silos, print their counts and draw their images and labels."""
    given = flagged(assignments, skip_bad=skip_bad, strict=strict)
    # The cut comes first: what the other fields mean unless told depends on it.
    cut = next((text.removeprefix("cut=") for text in given if text.startswith("cut=")), "")
    silos, images = override(defaults(name, cut), given).load(seed)
    console = Console()
    console.print(counts(silos, images))
    for line in concerns(silos, images):
        console.print(f"warning: {line}", style="yellow")
    written = picture(silos, images, out or Path(f"{name}-silos.png"))
    console.print(f"picture: {written}", soft_wrap=True)
