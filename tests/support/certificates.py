"""A certificate authority of a test's own, and certificates that it signs: for a name, expired, or anything else.

authority = Authority()
server_tls = authority.serving("hooks.example")       # an SSLContext for a server
client_tls = authority.trusted()                      # one that trusts this authority alone
"""

from __future__ import annotations

import ipaddress
import ssl
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = timedelta(days=1)


class Authority:
    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority of a test")])
        now = datetime.now(UTC)
        self._certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 30 * _DAY)
            .not_valid_after(now + 30 * _DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def trusted(self) -> ssl.SSLContext:
        """As the delivery process makes its own, with this authority in the place of the system's."""
        pem = self._certificate.public_bytes(serialization.Encoding.PEM)
        return ssl.create_default_context(cadata=pem.decode())

    def serving(self, name: str, *, until: timedelta = _DAY) -> ssl.SSLContext:
        """For a server of this name or address. ``until``, from now, may lie in the past."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            # No common name: clients that look there are clients of the last century.
            .subject_name(x509.Name([]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 20 * _DAY)
            .not_valid_after(now + until)
            .add_extension(x509.SubjectAlternativeName([_general(name)]), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as folder:
            chain = Path(folder) / "chain.pem"
            chain.write_bytes(
                key.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.NoEncryption(),
                )
                + certificate.public_bytes(serialization.Encoding.PEM)
            )
            context.load_cert_chain(chain)
        return context


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
