"""What the coordinator runs: no data, no keys, only the loop that every run goes through.

The same app runs simulated and deployed. Starting it again with the same settings goes on where the last complete
round stands.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from uefl.checkpoint import write_text
from uefl.commands.compare import show
from uefl.commands.words import spoken
from uefl.display import Display
from uefl.errors import InputError, Stopped
from uefl.experiment import Experiment
from uefl.flower.census import Fact, Patience
from uefl.flower.connect import agreed, connect
from uefl.run import Listener, Setting, drive, networked


def server_app() -> ServerApp:
    """The app the coordinator runs; its settings are the run configuration's."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        console, config = Console(width=120, highlight=False), dict(context.run_config)
        try:
            ((name, experiment),) = asked(config).items()
            with Display(console) as display:
                folder = serve(grid, experiment, config, listen=lambda event: display.hear(name, event))
            show({name: folder}, folder.parent, console)
        except (InputError, Stopped) as e:
            console.print(f"uefl: {e}", soft_wrap=True)
            raise

    return app


def asked(config: dict[str, Any]) -> dict[str, Experiment]:
    """The experiment that a run configuration describes, in the words of the command line."""
    words = [str(config["method"]), str(config["data"]), f"seed={config['seed']}", *str(config["settings"]).split()]
    found = spoken(words, [], str(config["preset"]))
    if len(found) > 1:
        raise InputError(f"one method at a time, not {', '.join(found)}")
    return {name: networked(experiment) for name, experiment in found.items()}


def serve(grid: Grid, experiment: Experiment, config: dict[str, Any], *, listen: Listener) -> Path:
    """Run an experiment with the silos behind this grid, or go on with it."""
    root, silos = Path(str(config["out"])), int(config["silos"])
    patience = Patience(
        wait=float(config["wait"]),
        deadline=float(config["deadline"]),
        quorum=int(config["quorum"]),
        retries=int(config["retries"]),
        poll=0.5,  # seconds, and a request to the SuperLink each time
    )
    # The server cannot see the data, so the federation's name stands for them: another name is another run.
    mark = hashlib.sha256(str(config["federation"]).encode()).hexdigest()[:16]
    run = experiment.id(mark)
    place = root / f"silos-{run}.json"  # who takes part
    listen({"kind": "load", "data": experiment.data.name})
    engine = connect(
        grid,
        experiment,
        silos=silos,
        patience=patience,
        half=bool(config["half"]),
        run=run,
        known=remembered(place),
        hear=lambda silo, doing: listen({"kind": "silo", "silo": silo, "doing": doing}),
    )
    root.mkdir(parents=True, exist_ok=True)
    write_text(place, json.dumps([fact._asdict() for fact in engine.facts], indent=1) + "\n")
    shape, classes = agreed(engine.facts)
    setting = Setting(mark, dict(engine.domains), classes, shape, engine="flower")
    return drive(experiment, root, setting, lambda: nullcontext(engine), listen)


def remembered(place: Path) -> list[Fact]:
    """Who takes part in a run that was begun before."""
    if not place.exists():
        return []
    told = json.loads(place.read_text())
    return [Fact(**{**f, "shape": tuple(f["shape"]), "classes": tuple(f["classes"])}) for f in told]
