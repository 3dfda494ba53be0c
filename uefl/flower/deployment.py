"""Write the folders of a deployed federation, one for the coordinator and one per silo."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path

import uefl
from uefl.core.errors import InputError, unknown_value_error
from uefl.flower import certificates
from uefl.flower import deployment_templates as templates

LOOPBACK_HOSTS = ("127.0.0.1", "localhost")


def write_deployment(
    folder: Path, silos: Sequence[str], *, address: str, port: int = 8443, federation_name: str = "federation"
) -> Path:
    """Write certificates, keys, configuration, start scripts and systemd units; overwrite nothing."""
    _check_arguments(folder, silos, address, port, federation_name)
    coordinator, ca_file = folder / "coordinator", folder / "authority" / "ca.crt"
    ca, ca_key = certificates.create_authority(ca_file.parent)
    certificates.create_server_certificate(coordinator, list(dict.fromkeys([address, *LOOPBACK_HOSTS])), ca, ca_key)
    _write_coordinator_folder(coordinator, address, port)
    run_config = templates.RUN_CONFIG.format(num_silos=len(silos), federation_name=federation_name)
    (coordinator / "federation.toml").write_text(run_config)
    for silo in silos:
        _write_silo_folder(folder / "silos" / silo, silo, {"address": address, "port": port})
        certificates.create_node_key(folder / "silos" / silo / "key", coordinator / "keys" / f"{silo}.pub")
    for owner in (coordinator, *(folder / "silos" / silo for silo in silos)):
        shutil.copy(ca_file, owner / "ca.crt")
    return folder


def find_flower_app() -> Path:
    """Return the folder of the Flower app: below this file in an installed package, else at the repository's root."""
    for folder in (Path(__file__).with_name("app"), Path(uefl.__file__).parents[1] / "flower_app"):
        if (folder / "pyproject.toml").exists():
            return folder
    raise InputError("the Flower app is not part of this installation")


def check_run_config(path: Path) -> None:
    """Check the run configuration of a coordinator before anything starts."""
    from uefl.flower.server import parse_run_config  # slow to import

    try:
        run_config = tomllib.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: {e}") from e
    defaults = tomllib.loads((find_flower_app() / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    for name, value in run_config.items():
        if name not in defaults:
            raise unknown_value_error("setting", name, defaults)
        if type(value) is not type(defaults[name]):
            raise InputError(f"{name}={value!r} has the wrong type; expected a value such as {defaults[name]!r}")
    parse_run_config({**defaults, **run_config})


def _write_coordinator_folder(folder: Path, address: str, port: int) -> None:
    shutil.copytree(find_flower_app(), folder / "app", ignore=shutil.ignore_patterns("__pycache__", "*.fab"))
    host = address if address in LOOPBACK_HOSTS else "0.0.0.0"
    connection = templates.CONNECTION_CONFIG.format(address=address, port=port)
    _write_script(folder / "superlink.sh", templates.SUPERLINK_COMMAND.format(host=host, port=port))
    _write_script(folder / "register.sh", templates.REGISTER_COMMAND, connection=connection)
    _write_script(folder / "run.sh", templates.RUN_COMMAND, connection=connection)
    _write_systemd_unit(folder, "uefl-superlink.service", "superlink.sh", "UEFL coordinator (Flower SuperLink)")


def _write_silo_folder(folder: Path, silo: str, endpoint: dict[str, object]) -> None:
    for subfolder in ("data", "state"):
        (folder / subfolder).mkdir(parents=True)
    _write_script(folder / "supernode.sh", templates.SUPERNODE_COMMAND.format(silo=silo, **endpoint))
    _write_systemd_unit(folder, "uefl-supernode.service", "supernode.sh", f"UEFL silo {silo} (Flower SuperNode)")


def _write_script(path: Path, command: str, *, connection: str = "") -> None:
    path.write_text(templates.make_script(command, connection=connection))
    path.chmod(0o755)


def _write_systemd_unit(folder: Path, unit: str, script: str, description: str) -> None:
    home = f"/opt/uefl/{folder.name}"
    text = templates.SYSTEMD_UNIT.format(home=home, unit=unit, script=script, description=description)
    (folder / unit).write_text(text)


def _check_arguments(folder: Path, silos: Sequence[str], address: str, port: int, federation_name: str) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; keys and certificates are never overwritten")
    if not silos:
        raise InputError("a federation needs the name of at least one silo")
    for name in (*silos, federation_name):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
            raise InputError(
                f"name '{name}' must be letters, digits, '.', '_' and '-', and start with a letter or digit"
            )
    if len(set(silos)) < len(silos) or "coordinator" in silos:
        raise InputError(f"silo names must be unique, and 'coordinator' is reserved: {', '.join(silos)}")
    if not re.fullmatch(r"[A-Za-z0-9.-]+", address):
        raise InputError(f"address '{address}' must be a host name or an IPv4 address")
    if not 1 <= port <= 65535:
        raise InputError(f"port={port} must be between 1 and 65535")
