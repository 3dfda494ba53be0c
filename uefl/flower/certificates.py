"""Who may speak with whom: a certificate authority, the coordinator's certificate, and a key for every silo."""

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

DAYS = 825  # of a certificate; `uefl deploy init` into a new folder makes new ones


def authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A new authority: `ca.crt` is for everyone, `ca.key` for nobody but who issues certificates."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = _named("uefl certificate authority")
    signing = x509.KeyUsage(
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
        _certificate(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signing, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    write(folder / "ca.crt", certificate.public_bytes(Encoding.PEM))
    secret(folder / "ca.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return certificate, key


def server(
    folder: Path, names: Sequence[str], ca: x509.Certificate, signer: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    """The coordinator's certificate, for these host names and addresses."""
    key = ec.generate_private_key(ec.SECP384R1())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    certificate = (
        _certificate(_named(names[0]), ca.subject, key)
        .add_extension(x509.SubjectAlternativeName([_host(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(signer, hashes.SHA384())
    )
    write(folder / "server.crt", certificate.public_bytes(Encoding.PEM))
    secret(folder / "server.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return certificate


def node_key(private: Path, public: Path) -> None:
    """A silo's key pair, in the form `ssh-keygen -t ecdsa -b 384` gives it."""
    key = ec.generate_private_key(ec.SECP384R1())
    secret(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    write(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def secret(path: Path, content: bytes) -> None:
    """A file only its owner can read, from its first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
