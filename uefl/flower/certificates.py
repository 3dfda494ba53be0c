"""Create the certificate authority, the coordinator's certificate and one key pair per silo."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_DAYS = 825  # lifetime of a certificate; `uefl deploy init` in a new folder creates new ones


def create_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Create an authority: `ca.crt` is public; `ca.key` signs certificates and stays offline."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = _make_common_name("uefl certificate authority")
    key_usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _make_builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    write_public_file(folder / "ca.crt", certificate.public_bytes(Encoding.PEM))
    write_secret_file(folder / "ca.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return certificate, key


def create_server_certificate(
    folder: Path, hosts: Sequence[str], ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    """Create the coordinator's certificate for these host names and addresses."""
    key = ec.generate_private_key(ec.SECP384R1())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    certificate = (
        _make_builder(_make_common_name(hosts[0]), ca.subject, key)
        .add_extension(x509.SubjectAlternativeName([_make_general_name(name) for name in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    write_public_file(folder / "server.crt", certificate.public_bytes(Encoding.PEM))
    write_secret_file(folder / "server.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return certificate


def create_node_key(private: Path, public: Path) -> None:
    """Create a silo's key pair in the format of `ssh-keygen -t ecdsa -b 384`."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret_file(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    write_public_file(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


def write_public_file(path: Path, content: bytes) -> None:
    """Write a file and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def write_secret_file(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can ever read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _make_builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
    )


def _make_common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _make_general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
