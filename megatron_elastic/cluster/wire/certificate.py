"""Certificate: one that a server makes for itself, for as long as it lives."""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_LIFE = datetime.timedelta(days=3650)


def self_signed() -> str:
    """A new key and its certificate in PEM form. Nobody checks it but by the fingerprint in the proof of the token."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "megatron_elastic")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - _LIFE).not_valid_after(now + _LIFE)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                               serialization.NoEncryption())
    return secret.decode() + certificate.public_bytes(serialization.Encoding.PEM).decode()
