"""`uefl deploy`: run a federation across machines, on Flower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from uefl.core.errors import InputError

group = typer.Typer(help="Run a federation across machines, on Flower.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="deploy")


@contextmanager
def _require_flower() -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise InputError("this needs Flower: install uefl with its extra `flower` (README, Install)") from None


@group.command()
def init(
    folder: Annotated[Path, typer.Argument(help="New folder to write into.")],
    silos: Annotated[list[str], typer.Argument(help="Names of the silos, such as north south west.")],
    address: Annotated[str, typer.Option(help="Host name or address at which silos reach the coordinator.")],
    port: Annotated[int, typer.Option(help="Port of the coordinator, the only one to open.")] = 8443,
    superlink_port: Annotated[
        int | None, typer.Option(help="Port of the SuperLink at 127.0.0.1; the next one after --port if absent.")
    ] = None,
    federation_name: Annotated[
        str, typer.Option(help="Name of the federation; a different name starts a different run.")
    ] = "federation",
) -> None:
    """Write the files of a new federation.

    These are certificates, keys, configuration, start scripts and systemd
    units.

    \b
    Example:
      uefl deploy init hospitals north south west --address fl.example.org
    """
    from rich.console import Console

    with _require_flower():
        from uefl.flower.deployment import write_deployment
    write_deployment(
        folder, silos, address=address, port=port, superlink_port=superlink_port, federation_name=federation_name
    )
    console = Console()
    console.print(f"written: {folder}", soft_wrap=True)
    console.print(f"coordinator: {folder / 'coordinator'}: serve.sh, register.sh, then run.sh", soft_wrap=True)
    for silo_name in silos:
        path = folder / "silos" / silo_name
        console.print(f"{silo_name}: {path}: put images into data/, then start node.sh", soft_wrap=True)
    console.print("Give each silo only its own folder, and keep authority/ca.key off the network.")


@group.command()
def serve(
    folder: Annotated[Path, typer.Argument(help="Folder of the coordinator.")],
    host: Annotated[str, typer.Option(help="Address at which the guard listens.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port at which the guard listens.")] = 8443,
    superlink_port: Annotated[int, typer.Option(help="Port of the SuperLink at 127.0.0.1.")] = 8444,
) -> None:
    """Run the coordinator: the SuperLink at 127.0.0.1, and the guard, which admits registered silos only.

    Example: `uefl deploy serve hospitals/coordinator`. The script serve.sh
    calls it.
    """
    with _require_flower():
        from uefl.flower.coordinator import CoordinatorOptions, run_coordinator
    _log_with_time_stamps()
    run_coordinator(CoordinatorOptions(folder.resolve(), host, port, superlink_port))


@group.command()
def node(
    folder: Annotated[Path, typer.Argument(help="Folder of the silo: key, node.crt and ca.crt.")],
    coordinator: Annotated[str, typer.Option(help="Address of the coordinator, as host:port.")],
    silo: Annotated[str, typer.Option(help="Name of the silo.")],
    data: Annotated[Path | None, typer.Option(help="Folder of images; data/ in the folder if absent.")] = None,
    device: Annotated[str, typer.Option(help="Device of computations, such as cpu or cuda.")] = "cpu",
    domain: Annotated[str, typer.Option(help="Domain of the silo's images; the silo's name if absent.")] = "",
) -> None:
    """Connect a silo to its coordinator, and answer messages by the installed client app.

    Example: `uefl deploy node silos/north --coordinator fl.example.org:8443
    --silo north`. The script node.sh calls it.
    """
    with _require_flower():
        from uefl.flower.node import NodeOptions, run_node
    _log_with_time_stamps()
    folder = folder.resolve()
    config = {
        "silo": silo,
        "data_path": str(data or folder / "data"),
        "state_path": str(folder / "state"),
        "device": device,
        "domain": domain,
    }
    run_node(NodeOptions(folder, coordinator, config))


@group.command()
def doctor(
    folder: Annotated[Path, typer.Argument(help="Folder of the coordinator, or of a silo.")],
) -> None:
    """Check files, certificates and connections of a coordinator or a silo; the exit code is 1 if a check fails.

    Example: `uefl deploy doctor hospitals/coordinator`.
    """
    with _require_flower():
        from uefl.flower.doctor import examine_folder
    checks = []
    for check in examine_folder(folder.resolve()):
        typer.echo(f"{'ok    ' if check.is_passed else 'FAILED'}  {check.text}")
        checks.append(check)
    raise typer.Exit(0 if all(check.is_passed for check in checks) else 1)


FederationFolder = Annotated[Path, typer.Argument(help="Folder that `uefl deploy init` wrote, with authority/ in it.")]


@group.command()
def renew(folder: FederationFolder) -> None:
    """Issue all certificates again for the existing keys; restart serve.sh and the nodes afterwards.

    Example: `uefl deploy renew hospitals`.
    """
    with _require_flower():
        from uefl.flower.membership import renew_certificates
    for path in renew_certificates(folder):
        typer.echo(f"give to its silo: {path}")
    typer.echo("restart serve.sh; every node needs its files before the old certificates expire")


@group.command("add-silo")
def add_silo(
    folder: FederationFolder,
    silo: Annotated[str, typer.Argument(help="Name of the new silo.")],
    public_key: Annotated[
        Path | None, typer.Option(help="key.pub that the silo created itself; without it a key is created.")
    ] = None,
) -> None:
    """Write the folder of a new silo; run register.sh afterwards.

    Example: `uefl deploy add-silo hospitals east`.
    """
    with _require_flower():
        from uefl.flower import membership
    typer.echo(f"written: {membership.add_silo(folder, silo, public_key)}; give it to the silo and run register.sh")
    typer.echo("the silo joins with the next run: raise num_silos and change federation_name in federation.toml")


@group.command("remove-silo")
def remove_silo(folder: FederationFolder, silo: Annotated[str, typer.Argument(help="Name of the silo.")]) -> None:
    """Delete the key of a silo at the coordinator; the guard rejects the silo from its next request on.

    While serve.sh runs, the key is deleted from the list of the SuperLink too.

    Example: `uefl deploy remove-silo hospitals east`.
    """
    with _require_flower():
        from uefl.flower import membership
    for line in membership.remove_silo(folder, silo):
        typer.echo(line)


@group.command()
def status(folder: Annotated[Path, typer.Argument(help="Folder of the coordinator.")]) -> None:
    """Show the last contact of every silo, the last round, and rejected replies.

    Example: `uefl deploy status hospitals/coordinator`.
    """
    with _require_flower():
        from uefl.flower.federation_status import describe_status
    for line in describe_status(folder):
        typer.echo(line)


@group.command()
def result(
    file: Annotated[Path, typer.Argument(help="federation.toml of a coordinator.")],
    since: Annotated[float, typer.Option(help="Time in seconds; an older result is that of another run.")] = 0,
) -> None:
    """Print how the last run ended and exit with its code: 0, 1 (failed), 2 (wrong input) or 3 (can be resumed).

    Example: `uefl deploy result hospitals/coordinator/federation.toml`. The
    script run.sh calls it.
    """
    with _require_flower():
        from uefl.flower.federation_status import read_output_folder, read_result_since
    outcome = read_result_since(read_output_folder(file), since)
    typer.echo(f"run {outcome.status}{f': {outcome.message}' if outcome.message else ''}")
    raise typer.Exit(outcome.exit_code)


def _log_with_time_stamps() -> None:
    import logging

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z", level="INFO")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it writes a line per request


@group.command()
def check(
    file: Annotated[Path, typer.Argument(help="federation.toml of a coordinator.")],
    certificates_only: Annotated[bool, typer.Option(help="Check only that no certificate has expired.")] = False,
) -> None:
    """Check the certificates and the run configuration of a coordinator; register.sh and run.sh do this first.

    \b
    Example:
      uefl deploy check hospitals/coordinator/federation.toml
    """
    with _require_flower():
        from uefl.flower.certificates import check_expiry
        from uefl.flower.deployment import check_run_config
    check_expiry(file.parent)
    if not certificates_only:
        check_run_config(file)


@group.command()
def demo(
    folder: Annotated[Path, typer.Argument(help="New folder to write into.")] = Path("runs/deploy-demo"),
) -> None:
    """Run three silos on this machine over TLS, each with its own folder of digits.

    \b
    Example:
      uefl deploy demo
    """
    from rich.console import Console

    with _require_flower():
        from uefl.flower.demo import run_demo
    run_demo(folder.resolve(), Console())
