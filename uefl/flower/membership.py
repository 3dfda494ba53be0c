"""Change a deployment that exists: renew its certificates, add and remove silos."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
from cryptography import x509

from uefl.core.errors import InputError
from uefl.flower import certificates
from uefl.flower.deployment import LOOPBACK_HOSTS, check_name, write_silo
from uefl.flower.doctor import read_ports
from uefl.flower.fleet_connection import unregister_key


def renew_certificates(folder: Path) -> list[Path]:
    """Issue all certificates again for the existing keys; return the files that silos need."""
    authority, coordinator = folder / "authority", folder / "coordinator"
    certificates.renew_authority(authority)
    ca, ca_key = certificates.load_authority(authority)
    hosts, key = read_server_certificate(coordinator / "server.crt")
    certificates.issue_server_certificate(coordinator / "server.crt", hosts, key, ca, ca_key)
    shutil.copy(authority / "ca.crt", coordinator / "ca.crt")
    files = []
    for public_key in sorted((coordinator / "keys").glob("*.pub")):
        silo_folder = folder / "silos" / public_key.stem
        certificates.issue_node_certificate(silo_folder / "node.crt", public_key.stem, public_key, ca, ca_key)
        shutil.copy(authority / "ca.crt", silo_folder / "ca.crt")
        files += [silo_folder / "node.crt", silo_folder / "ca.crt"]
    return files


def add_silo(folder: Path, silo: str, public_key: Path | None = None) -> Path:
    """Write the folder of a new silo, with a new key or for a public key that the silo created itself."""
    check_name(silo)
    if (folder / "coordinator/keys" / f"{silo}.pub").exists() or (folder / "silos" / silo).exists():
        raise InputError(f"silo {silo} exists already; remove it first, or choose another name")
    port, _ = read_ports(folder / "coordinator/serve.sh")
    hosts, _ = read_server_certificate(folder / "coordinator/server.crt")
    return write_silo(folder, silo, hosts[0], port, public_key)


def remove_silo(folder: Path, silo: str) -> list[str]:
    """Delete the key of a silo at guard and SuperLink; return lines that tell what was deleted and what remains."""
    coordinator = folder / "coordinator"
    path = coordinator / "keys" / f"{silo}.pub"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.pub")))
        raise InputError(f"silo {silo} is not registered; registered: {known or 'none'}")
    key, (_, superlink_port) = path.read_bytes(), read_ports(coordinator / "serve.sh")
    path.unlink()  # first of all, so that the guard rejects the silo whatever happens next
    return [f"deleted: {path}", f"{silo}: {_unregister_key(superlink_port, coordinator / 'ca.crt', key)}"]


def _unregister_key(superlink_port: int, ca: Path, key: bytes) -> str:
    try:
        is_listed = unregister_key(superlink_port, ca, certificates.parse_public_key(key))
    except (httpx.HTTPError, ValueError, OSError):
        return (
            "the SuperLink does not answer, so its list keeps the key; the guard rejects the key, "
            "and no other machine reaches the SuperLink"
        )
    return f"its key {'is deleted at' if is_listed else 'was not registered at'} the SuperLink too"


def read_server_certificate(path: Path) -> tuple[list[str], certificates.PublicKey]:
    """Return the names of a coordinator, its public address first, and its public key."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: no readable certificate") from e
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = [str(name.value) for name in names]
    key = certificate.public_key()
    assert isinstance(key, certificates.PublicKey)
    return sorted(hosts, key=lambda host: host in LOOPBACK_HOSTS), key
