# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Certificates for loopback TLS tests, made anew in each session so that none is kept in the repository."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def make_tls_files(folder: Path) -> dict[str, Any]:
    """Write an authority and two certificates that it signed.

    Returns:
        `ca`, `client_cert` and `client_key` as PEM paths; `server_context` for 127.0.0.1, and `strict_server_context`,
        which asks for a client certificate.
    """
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    ca = _sign(ca_name, ca_name, ca_key, ca_key, is_authority=True)
    paths: dict[str, Any] = {"ca": _write_cert(folder / "ca.pem", ca)}
    for owner in ("server", "client"):
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, owner)])
        paths[f"{owner}_cert"] = _write_cert(folder / f"{owner}.pem", _sign(name, ca_name, key, ca_key))
        paths[f"{owner}_key"] = _write_key(folder / f"{owner}.key", key)
    for context_name in ("server_context", "strict_server_context"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(paths["server_cert"], paths["server_key"])
        if context_name == "strict_server_context":
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(paths["ca"])
        paths[context_name] = context
    return paths


def _sign(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signing_key: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool = False,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.timezone.utc)
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .sign(signing_key, hashes.SHA256())
    )


def _write_cert(path: Path, certificate: x509.Certificate) -> Path:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> Path:
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return path
