"""Create and load the certificate authority, the coordinator's certificate, and a key and certificate per silo."""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from uefl.core.errors import InputError

VALID_DAYS = 825  # lifetime of a certificate; `uefl deploy renew` issues new ones
WARNING_DAYS = 30  # an expiry is announced this long ahead
PublicKey = ec.EllipticCurvePublicKey
CERTIFICATE_FILES = ("ca.crt", "server.crt", "node.crt")


def create_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Create an authority: `ca.crt` is public; `ca.key` signs certificates and stays offline."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret_file(folder / "ca.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return _write_authority_certificate(folder, key), key


def renew_authority(folder: Path) -> None:
    """Issue the certificate of an authority again; certificates that its key signed stay valid."""
    _write_authority_certificate(folder, load_authority(folder)[1])


def _write_authority_certificate(folder: Path, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
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
        _make_builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    write_public_file(folder / "ca.crt", certificate.public_bytes(Encoding.PEM))
    return certificate


def create_server_certificate(
    folder: Path, hosts: Sequence[str], ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    """Create the coordinator's key and its certificate for these host names and addresses."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret_file(folder / "server.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return issue_server_certificate(folder / "server.crt", hosts, key.public_key(), ca, ca_key)


def issue_server_certificate(
    path: Path,
    hosts: Sequence[str],
    public_key: ec.EllipticCurvePublicKey,
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    """Write a certificate of the coordinator for an existing key."""
    names = x509.SubjectAlternativeName([_make_general_name(name) for name in hosts])
    builder = _make_builder(_make_common_name(hosts[0]), ca.subject, public_key).add_extension(names, critical=False)
    return _sign_certificate(path, builder, ExtendedKeyUsageOID.SERVER_AUTH, ca_key)


def issue_node_certificate(
    path: Path, silo: str, public_key_file: Path, ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    """Write the certificate by which the coordinator recognizes the key of a silo."""
    builder = _make_builder(_make_common_name(silo), ca.subject, load_public_key(public_key_file))
    return _sign_certificate(path, builder, ExtendedKeyUsageOID.CLIENT_AUTH, ca_key)


def _sign_certificate(
    path: Path, builder: x509.CertificateBuilder, usage: x509.ObjectIdentifier, ca_key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    certificate = (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    write_public_file(path, certificate.public_bytes(Encoding.PEM))
    return certificate


def load_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return certificate and key of an authority that was created before."""
    try:
        key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
        certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    except (OSError, ValueError) as e:
        raise InputError(f"{folder}: no readable authority (ca.key, ca.crt); it may be in offline storage") from e
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return certificate, key


def load_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key of a silo, in the format of ssh-keygen."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: no readable private key; create it by `ssh-keygen -t ecdsa -b 384 -N ''`") from e
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"{path}: not an ECDSA key; create it by `ssh-keygen -t ecdsa -b 384 -N ''`")
    return key


def load_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """Return the public key of a silo, in the format of ssh-keygen."""
    try:
        return parse_public_key(path.read_bytes())
    except InputError as e:
        raise InputError(f"{path}: {e}") from e
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: no readable public key in the format of ssh-keygen") from e


def parse_public_key(content: bytes) -> ec.EllipticCurvePublicKey:
    """Return the public key in the content of a file that ssh-keygen wrote."""
    key = load_ssh_public_key(content)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InputError("not an ECDSA key")
    return key


def load_client_context(folder: Path) -> ssl.SSLContext:
    """Return the TLS side of a silo: it verifies the coordinator by ca.crt and shows node.crt."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    key = load_node_key(folder / "key").private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        context.load_verify_locations(folder / "ca.crt")
        with tempfile.NamedTemporaryFile() as file:  # readable by its owner only; OpenSSL does not read SSH keys
            file.write(key)
            file.flush()
            context.load_cert_chain(folder / "node.crt", file.name)
        _check_issuer(folder / "node.crt", folder / "ca.crt")
    except OSError as e:  # also ssl.SSLError
        raise InputError(f"{folder}: ca.crt or node.crt is missing, unreadable or of another key ({e})") from e
    return context


def _check_issuer(certificate: Path, ca: Path) -> None:
    authority = x509.load_pem_x509_certificate(ca.read_bytes())
    try:
        x509.load_pem_x509_certificate(certificate.read_bytes()).verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError) as e:
        raise InputError(f"{certificate}: not issued by ca.crt; get both from the coordinator's operator") from e


def load_server_context(folder: Path) -> ssl.SSLContext:
    """Return the TLS side of the coordinator: it shows server.crt and requires a certificate of its authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(folder / "ca.crt")
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
    except (OSError, ssl.SSLError) as e:
        raise InputError(f"{folder}: ca.crt, server.crt or server.key is missing or unreadable ({e})") from e
    return context


def describe_expiry(folder: Path) -> Iterator[str]:
    """Yield a line for every certificate in a folder that has expired or expires within 30 days."""
    for path in (folder / name for name in CERTIFICATE_FILES if (folder / name).exists()):
        end = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
        days = (end - datetime.datetime.now(datetime.UTC)).days
        if days < 0:
            yield f"{path.name} expired on {end:%Y-%m-%d}; the coordinator's operator runs `uefl deploy renew`"
        elif days < WARNING_DAYS:
            yield f"{path.name} expires on {end:%Y-%m-%d}, in {days} days; run `uefl deploy renew` before"


def check_expiry(folder: Path) -> None:
    """Raise an `InputError` for the first certificate in a folder that has expired."""
    for line in describe_expiry(folder):
        if " expired on " in line:
            raise InputError(line)


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


def _make_builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
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
