"""The server app of the coordinator: it runs the loop that every run uses, without data and without keys.

The same app runs simulated and deployed. With the same settings it resumes a run after the last complete round.
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

from uefl.core.errors import InputError, ResumableError
from uefl.experiment.comparison import print_results
from uefl.experiment.experiment import Experiment
from uefl.experiment.files import write_text
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.progress import ProgressDisplay
from uefl.experiment.run import Listener, RunContext, require_network_support, run_with_clients
from uefl.flower.connect import agree_on_shape_and_classes, connect
from uefl.flower.silo_registry import RoundPolicy, SiloInfo

POLL_INTERVAL_SECONDS = 0.5  # every poll is a request to the SuperLink


def make_server_app() -> ServerApp:
    """Return the app of the coordinator; its settings are the run configuration."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        console, run_config = Console(width=120, highlight=False), dict(context.run_config)
        try:
            ((name, experiment),) = parse_run_config(run_config).items()
            with ProgressDisplay(console) as display:
                folder = serve(grid, experiment, run_config, on_event=lambda event: display.on_event(name, event))
            print_results({name: folder}, folder.parent, console)
        except (InputError, ResumableError) as e:
            console.print(f"uefl: {e}", soft_wrap=True)
            raise

    return app


def parse_run_config(run_config: dict[str, Any]) -> dict[str, Experiment]:
    """Return the experiment of a run configuration, by method name; it is parsed like a command line."""
    settings = str(run_config["settings"]).split()
    arguments = [str(run_config["method"]), str(run_config["data"]), f"seed={run_config['seed']}", *settings]
    experiments = parse_experiments(arguments, [], str(run_config["preset"]))
    if len(experiments) > 1:
        raise InputError(f"choose one method, not {', '.join(experiments)}")
    return {name: require_network_support(experiment) for name, experiment in experiments.items()}


def serve(grid: Grid, experiment: Experiment, run_config: dict[str, Any], *, on_event: Listener) -> Path:
    """Run or resume an experiment with the silos behind this grid; return the run folder."""
    root = Path(str(run_config["out"]))
    policy = RoundPolicy(
        connect_timeout=float(run_config["connect_timeout"]),
        reply_timeout=float(run_config["reply_timeout"]),
        grace=float(run_config["grace"]),
        quorum=int(run_config["quorum"]),
        retries=int(run_config["retries"]),
        data_changes=run_config["data_changes"],
        poll_interval=POLL_INTERVAL_SECONDS,
    )
    # The server cannot read the data, so a hash of the federation's name takes the place of their fingerprint.
    fingerprint = hashlib.sha256(str(run_config["federation_name"]).encode()).hexdigest()[:16]
    run_id = experiment.run_id(fingerprint)
    silos_file = root / f"silos-{run_id}.json"
    on_event({"kind": "load", "data": experiment.data.name})
    engine = connect(
        grid,
        experiment,
        num_silos=int(run_config["num_silos"]),
        policy=policy,
        half_precision=bool(run_config["half_precision"]),
        run_id=run_id,
        known_silos=load_known_silos(silos_file),
        on_silo_event=lambda silo, activity: on_event({"kind": "silo", "silo": silo, "activity": activity}),
    )
    root.mkdir(parents=True, exist_ok=True)
    write_text(silos_file, json.dumps([info._asdict() for info in engine.silo_infos], indent=1) + "\n")
    image_shape, class_names = agree_on_shape_and_classes(engine.silo_infos)
    context = RunContext(fingerprint, dict(engine.domains), class_names, image_shape, engine="flower")
    return run_with_clients(experiment, root, context, lambda: nullcontext(engine), on_event)


def load_known_silos(path: Path) -> list[SiloInfo]:
    """Return the silos of a run that was started before."""
    if not path.exists():
        return []
    records = json.loads(path.read_text())
    return [SiloInfo(**{**r, "image_shape": tuple(r["image_shape"]), "classes": tuple(r["classes"])}) for r in records]
