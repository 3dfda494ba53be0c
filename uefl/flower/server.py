"""The server app of the coordinator: it runs the loop that every run uses, without data and without keys.

The same app runs simulated and deployed. With the same settings it resumes a run after the last complete round.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from uefl.core.errors import InputError, ResumableError
from uefl.core.untrusted_text import escape_text
from uefl.data.table_format import parse_sums
from uefl.experiment.comparison import print_results
from uefl.experiment.experiment import Experiment
from uefl.experiment.files import ensure_writable_folder, write_text
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.progress import ProgressDisplay
from uefl.experiment.run import Listener, RunContext, require_network_support, run_with_clients
from uefl.flower.connect import connect
from uefl.flower.data_format import DataFormat, parse_data_format
from uefl.flower.join_server import print_join, serve_join
from uefl.flower.run_result import record_result
from uefl.flower.silo_registry import RoundPolicy, SiloInfo

POLL_INTERVAL_SECONDS = 0.5  # every poll is a request to the SuperLink


def make_server_app() -> ServerApp:
    """Return the app of the coordinator; its settings are the run configuration."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        console, run_config = Console(width=120, highlight=False), dict(context.run_config)
        root = Path(str(run_config["out"]))
        try:
            with record_result(root) as details, explain_superlink_errors():
                if run_config["join"]:
                    details["folder"] = join_finished_run(grid, run_config, console)
                    return
                ((name, experiment),) = parse_run_config(run_config).items()
                with ProgressDisplay(console) as display:
                    folder = serve(grid, experiment, run_config, on_event=lambda event: display.on_event(name, event))
                details["folder"] = folder
            print_results({name: folder}, folder.parent, console)
        except (InputError, ResumableError) as e:
            console.print(f"uefl: {e}", soft_wrap=True, markup=False)
            raise

    return app


def parse_run_config(run_config: dict[str, Any]) -> dict[str, Experiment]:
    """Return the experiment of a run configuration, by method name; it is parsed like a command line."""
    settings = shlex.split(str(run_config["settings"]))
    arguments = [str(run_config["method"]), str(run_config["data"]), f"seed={run_config['seed']}", *settings]
    experiments = parse_experiments(arguments, [], str(run_config["preset"]))
    if len(experiments) > 1:
        raise InputError(f"choose one method, not {', '.join(experiments)}")
    return {name: require_network_support(experiment) for name, experiment in experiments.items()}


def parse_policy(run_config: dict[str, Any]) -> RoundPolicy:
    """Return the timeouts and the quorum of a run configuration."""
    num_silos, quorum = int(run_config["num_silos"]), int(run_config["quorum"])
    if num_silos < 1:
        raise InputError(f"num_silos={num_silos} must be at least 1")
    if quorum > num_silos:
        raise InputError(f"quorum={quorum} must be at most num_silos={num_silos}")
    return RoundPolicy(
        connect_timeout=float(run_config["connect_timeout"]),
        reply_timeout=float(run_config["reply_timeout"]),
        grace=float(run_config["grace"]),
        quorum=quorum,
        retries=int(run_config["retries"]),
        data_changes=run_config["data_changes"],
        poll_interval=POLL_INTERVAL_SECONDS,
    )


def serve(grid: Grid, experiment: Experiment, run_config: dict[str, Any], *, on_event: Listener) -> Path:
    """Run or resume an experiment with the silos behind this grid; return the run folder."""
    root, policy = Path(str(run_config["out"])), parse_policy(run_config)
    # The server cannot read the data, so a hash of the federation's name takes the place of their fingerprint.
    fingerprint = hashlib.sha256(str(run_config["federation_name"]).encode()).hexdigest()[:16]
    run_id = experiment.run_id(fingerprint)
    store = RegistrationStore(root / f"silos-{run_id}.json")
    known_silos, data_format = store.read(parse_data_format(str(run_config["image_shape"]), str(run_config["classes"])))
    on_event({"kind": "load", "data": experiment.data.name})
    engine = connect(
        grid,
        experiment,
        num_silos=int(run_config["num_silos"]),
        policy=policy,
        half_precision=bool(run_config["half_precision"]),
        run_id=run_id,
        known_silos=known_silos,
        data_format=data_format,
        on_silo_event=lambda silo, activity: on_event({"kind": "silo", "silo": silo, "activity": activity}),
    )
    store.write(engine.silo_infos, DataFormat(engine.image_shape, engine.class_names, engine.table))
    context = RunContext(
        fingerprint,
        dict(engine.domains),
        engine.class_names,
        engine.image_shape,
        engine="flower",
        table=engine.table,
    )
    return run_with_clients(experiment, root, context, lambda: nullcontext(engine), on_event)


def join_finished_run(grid: Grid, run_config: dict[str, Any], console: Console) -> Path:
    """Let a registered silo join a finished run, and print the result."""

    def on_silo_event(silo_name: str, activity: str) -> None:
        console.print(f"{silo_name}: {activity}" if silo_name else activity, soft_wrap=True, markup=False)

    folder = serve_join(grid, run_config, parse_policy(run_config), on_silo_event=on_silo_event)
    print_join(folder, console)
    return folder


@contextmanager
def explain_superlink_errors() -> Iterator[None]:
    """Turn an error of the SuperLink, such as a full disk under its database, into one line."""
    try:
        yield
    except httpx.HTTPError as e:
        reason = " ".join(str(e).split("\n")[0].split()) or type(e).__name__
        raise ResumableError(
            f"the SuperLink failed ({escape_text(reason, 200)}); see the log of serve.sh; "
            "run the same command again to resume"
        ) from e


class RegistrationStore:
    """The silos of a run with the keys that their names are bound to, and the format of their data.

    The file keeps them when the coordinator starts again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, configured: DataFormat) -> tuple[list[SiloInfo], DataFormat]:
        """Return the silos and the format of a run that was started before; without one, no silos and what is set."""
        if not self.path.exists():
            return [], configured
        try:
            values = json.loads(self.path.read_text())
            silos = [_make_tuples(SiloInfo(**silo)) for silo in values["silos"]]
            stored = DataFormat(tuple(values["image_shape"]), tuple(values["classes"]), str(values.get("table", "")))
        except (KeyError, TypeError, ValueError) as e:
            raise InputError(f"{self.path} is damaged ({e}); delete it to register the silos anew") from None
        for name, value, stored_value in zip(DataFormat._fields, configured, stored):
            if value and value != stored_value:
                raise InputError(
                    f"this run was started with another value of {name}; set federation_name to start a new run"
                )
        return silos, stored

    def write(self, silo_infos: Sequence[SiloInfo], data_format: DataFormat) -> None:
        """Write the silos and the format of their data."""
        values = {**data_format._asdict(), "silos": [info._asdict() for info in silo_infos]}
        write_text(ensure_writable_folder(self.path.parent) / self.path.name, json.dumps(values, indent=1) + "\n")


def _make_tuples(info: SiloInfo) -> SiloInfo:
    sums = info.column_sums and parse_sums(info.column_sums, len(info.image_shape) and info.image_shape[0])
    return info._replace(image_shape=tuple(info.image_shape), classes=tuple(info.classes), column_sums=sums)
