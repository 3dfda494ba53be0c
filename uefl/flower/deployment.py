"""Write the folders of a deployed federation, one for the coordinator and one per silo."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path

import uefl
from uefl.core.errors import InputError, unknown_value_error
from uefl.experiment.files import make_private_folder
from uefl.flower import certificates
from uefl.flower import deployment_templates as templates

LOOPBACK_HOSTS = ("127.0.0.1", "localhost")


def write_deployment(
    folder: Path,
    silos: Sequence[str],
    *,
    address: str,
    port: int = 8443,
    superlink_port: int | None = None,
    federation_name: str = "federation",
) -> Path:
    """Write certificates, keys, configuration, start scripts and systemd units; overwrite nothing."""
    superlink_port = port + 1 if superlink_port is None else superlink_port
    _check_arguments(folder, silos, address, (port, superlink_port), federation_name)
    coordinator, authority = make_private_folder(folder) / "coordinator", folder / "authority"
    for private_folder in (coordinator, authority, folder / "silos"):
        make_private_folder(private_folder)
    ca, ca_key = certificates.create_authority(authority)
    certificates.create_server_certificate(coordinator, list_hosts(address), ca, ca_key)
    shutil.copy(authority / "ca.crt", coordinator / "ca.crt")
    _write_coordinator_folder(coordinator, address, port, superlink_port)
    run_config = templates.RUN_CONFIG.format(num_silos=len(silos), federation_name=federation_name)
    (coordinator / "federation.toml").write_text(run_config)
    for silo in silos:
        write_silo(folder, silo, address, port)
    return folder


def list_hosts(address: str) -> list[str]:
    """Return the names for which the certificate of a coordinator is valid."""
    return list(dict.fromkeys([address, *LOOPBACK_HOSTS]))


def write_silo(folder: Path, silo: str, address: str, port: int, own_key: Path | None = None) -> Path:
    """Write the folder of a silo and its public key at the coordinator; create a key if it has none."""
    silo_folder, public_key = folder / "silos" / silo, folder / "coordinator" / "keys" / f"{silo}.pub"
    ca, ca_key = certificates.load_authority(folder / "authority")
    _write_silo_folder(silo_folder, silo, {"address": address, "port": port})
    if own_key is None:
        certificates.create_node_key(silo_folder / "key", public_key)
    else:
        certificates.load_public_key(own_key)  # an unreadable one is an error
        shutil.copy(own_key, public_key)
    certificates.issue_node_certificate(silo_folder / "node.crt", silo, public_key, ca, ca_key)
    shutil.copy(folder / "authority" / "ca.crt", silo_folder / "ca.crt")
    return silo_folder


def find_flower_app() -> Path:
    """Return the folder of the Flower app: below this file in an installed package, else at the repository's root."""
    for folder in (Path(__file__).with_name("app"), Path(uefl.__file__).parents[1] / "flower_app"):
        if (folder / "pyproject.toml").exists():
            return folder
    raise InputError("the Flower app is not part of this installation")


def check_run_config(path: Path) -> None:
    """Check the run configuration of a coordinator before anything starts."""
    from uefl.flower.data_format import parse_data_format  # slow to import, as it imports torch
    from uefl.flower.join_server import parse_join_settings
    from uefl.flower.server import parse_policy, parse_run_config

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
    run_config = {**defaults, **run_config}
    parse_run_config(run_config)
    parse_policy(run_config)
    parse_data_format(run_config["image_shape"], run_config["classes"])
    if run_config["join"]:
        parse_join_settings(run_config)


def _write_coordinator_folder(folder: Path, address: str, port: int, superlink_port: int) -> None:
    shutil.copytree(find_flower_app(), folder / "app", ignore=shutil.ignore_patterns("__pycache__", "*.fab"))
    host = address if address in LOOPBACK_HOSTS else "0.0.0.0"
    connection = templates.CONNECTION_CONFIG.format(superlink_port=superlink_port)
    serve_command = templates.SERVE_COMMAND.format(host=host, port=port, superlink_port=superlink_port)
    _write_script(folder / "serve.sh", serve_command)
    _write_script(folder / "register.sh", templates.REGISTER_COMMAND, connection=connection)
    _write_script(folder / "run.sh", templates.RUN_COMMAND, connection=connection)
    _write_systemd_unit(folder, "uefl-coordinator.service", "serve.sh", "UEFL coordinator")


def _write_silo_folder(folder: Path, silo: str, endpoint: dict[str, object]) -> None:
    for private_folder in (folder, folder / "data", folder / "state"):
        make_private_folder(private_folder)
    _write_script(folder / "node.sh", templates.NODE_COMMAND.format(silo=silo, **endpoint))
    _write_systemd_unit(folder, "uefl-node.service", "node.sh", f"UEFL silo {silo}")


def _write_script(path: Path, command: str, *, connection: str = "") -> None:
    path.write_text(templates.make_script(command, connection=connection))
    path.chmod(0o755)


def _write_systemd_unit(folder: Path, unit: str, script: str, description: str) -> None:
    home = f"/opt/uefl/{folder.name}"
    text = templates.SYSTEMD_UNIT.format(home=home, unit=unit, script=script, description=description)
    (folder / unit).write_text(text)


def check_name(name: str) -> None:
    """Reject a name that is not safe as a part of paths and scripts."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
        raise InputError(f"name '{name}' must be letters, digits, '.', '_' and '-', and start with a letter or digit")


def _check_arguments(
    folder: Path, silos: Sequence[str], address: str, ports: tuple[int, int], federation_name: str
) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; keys and certificates are never overwritten")
    if not silos:
        raise InputError("a federation needs the name of at least one silo")
    for name in (*silos, federation_name):
        check_name(name)
    if len(set(silos)) < len(silos) or "coordinator" in silos:
        raise InputError(f"silo names must be unique, and 'coordinator' is reserved: {', '.join(silos)}")
    if not re.fullmatch(r"[A-Za-z0-9.-]+", address):
        raise InputError(f"address '{address}' must be a host name or an IPv4 address")
    for port in ports:
        if not 1 <= port <= 65535:
            raise InputError(f"port={port} must be between 1 and 65535")
    if len(set(ports)) < len(ports):
        raise InputError(f"guard and SuperLink need different ports, not both {ports[0]}")
