"""A federation's folders, ready to be carried to where they run: one for the coordinator, one for each silo."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path

import uefl
from uefl.errors import InputError, unknown
from uefl.flower import certificates, scripts

LOOPBACK = ("127.0.0.1", "localhost")


def init(folder: Path, silos: Sequence[str], *, address: str, port: int = 8443, name: str = "federation") -> Path:
    """Write certificates, keys, configuration, start scripts and systemd units; nothing is ever overwritten."""
    _check(folder, silos, address, port, name)
    coordinator = folder / "coordinator"
    ca, signer = certificates.authority(folder / "authority")
    certificates.server(coordinator, list(dict.fromkeys([address, *LOOPBACK])), ca, signer)
    shutil.copy(folder / "authority" / "ca.crt", coordinator / "ca.crt")
    shutil.copytree(app(), coordinator / "app", ignore=shutil.ignore_patterns("__pycache__", "*.fab"))
    where = {"address": address, "port": port}
    connects = scripts.CONNECTION.format(**where)
    bind = address if address in LOOPBACK else "0.0.0.0"
    _script(coordinator / "superlink.sh", scripts.script(scripts.SUPERLINK.format(bind=bind, port=port)))
    _script(coordinator / "register.sh", scripts.script(scripts.REGISTER, connects=connects))
    _script(coordinator / "run.sh", scripts.script(scripts.RUN, connects=connects))
    (coordinator / "federation.toml").write_text(scripts.FEDERATION.format(silos=len(silos), name=name))
    _unit(coordinator, "uefl-superlink.service", "superlink.sh", "UEFL coordinator (Flower SuperLink)")
    for silo in silos:
        _silo(folder / "silos" / silo, silo, where)
        shutil.copy(folder / "authority" / "ca.crt", folder / "silos" / silo / "ca.crt")
        certificates.node_key(folder / "silos" / silo / "key", coordinator / "keys" / f"{silo}.pub")
    return folder


def app() -> Path:
    """The Flower app: in an installed package below this file, in the repository at its root."""
    for place in (Path(__file__).with_name("app"), Path(uefl.__file__).parents[1] / "flower_app"):
        if (place / "pyproject.toml").exists():
            return place
    raise InputError("the Flower app is not part of this installation")


def check(file: Path) -> None:
    """Look at a run's configuration before anything starts."""
    from uefl.flower.server import asked  # slow to import

    try:
        told = tomllib.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise InputError(f"{file}: {e}") from e
    known = tomllib.loads((app() / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    for name, value in told.items():
        if name not in known:
            raise unknown("setting", name, known)
        if type(value) is not type(known[name]):
            raise InputError(f"{name}={value!r} is not of the form {known[name]!r}")
    asked({**known, **told})


def _silo(folder: Path, silo: str, where: dict[str, object]) -> None:
    for inner in ("data", "state"):
        (folder / inner).mkdir(parents=True)
    _script(folder / "supernode.sh", scripts.script(scripts.SUPERNODE.format(silo=silo, **where)))
    _unit(folder, "uefl-supernode.service", "supernode.sh", f"UEFL silo {silo} (Flower SuperNode)")


def _script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _unit(folder: Path, unit: str, script: str, about: str) -> None:
    home = f"/opt/uefl/{folder.name}"
    (folder / unit).write_text(scripts.UNIT.format(home=home, unit=unit, script=script, about=about))


def _check(folder: Path, silos: Sequence[str], address: str, port: int, name: str) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; keys and certificates are never overwritten")
    if not silos:
        raise InputError("a federation needs silos: name them")
    for word in (*silos, name):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", word):
            raise InputError(
                f"name '{word}' must be letters, digits, '.', '_' and '-', beginning with a letter or digit"
            )
    if len(set(silos)) < len(silos) or "coordinator" in silos:
        raise InputError(f"silos {', '.join(silos)} must have different names, and none is the coordinator")
    if not re.fullmatch(r"[A-Za-z0-9.-]+", address):
        raise InputError(f"address '{address}' must be a host name or an IPv4 address")
    if not 1 <= port <= 65535:
        raise InputError(f"port={port} must be between 1 and 65535")
