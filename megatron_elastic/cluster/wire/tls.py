"""TLS: the contexts of both ends. TLS 1.3 only, nothing that could be resumed or sent early."""

from __future__ import annotations

import contextlib
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from megatron_elastic.cluster.wire.framing import WireError
from megatron_elastic.cluster.wire.proof import fingerprint
from megatron_elastic.config import ElasticConfig, UsageError

CLOSED = "the coordinator closed the connection in the handshake; do all nodes have the same --elastic-tls flags?"
"""What a client says that was sent away in a crowd, again and again, or had no certificate that was accepted."""


class Certificates(msgspec.Struct, frozen=True):
    """The user's certificate, its key and who signed both ends' certificates: paths of PEM files."""

    cert: str
    key: str
    ca: str


class Credentials(msgspec.Struct, frozen=True):
    """What one end of a connection shows the other. Without certificates the server makes one for itself."""

    token: str
    certificates: Certificates | None = None


@dataclass(frozen=True, slots=True)
class ServerSide:
    """What a server needs for TLS, and the fingerprint of the certificate that clients will see."""

    context: ssl.SSLContext
    fingerprint: bytes


def client_context(certificates: Certificates | None) -> ssl.SSLContext:
    """For connecting. The server's certificate is checked if the user has given some; the proof of the token binds it.

    Names in certificates are not compared: which host coordinates may change, and whoever answers must prove the token.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_NONE
    if certificates is not None:
        _load(context, certificates)
    return context


def server_side(certificates: Certificates) -> ServerSide:
    """For listening with the user's certificates: clients must have one that the same authority signed."""
    context = _server_context()
    _load(context, certificates)
    return ServerSide(context, _first_fingerprint(Path(certificates.cert).read_text(errors="replace")))


class Renewed:
    """``server_side``, of files that may be replaced while we listen."""

    def __init__(self, certificates: Certificates) -> None:
        self._certificates = certificates
        self._known = self._stamp(), server_side(certificates)

    @property
    def side(self) -> ServerSide:
        """As the files were when they were looked at last."""
        return self._known[1]

    def look(self) -> None:
        """Read them again if they are others. While one of them is another already, those of before are kept."""
        with contextlib.suppress(OSError, ValueError, UsageError):
            if (stamp := self._stamp()) != self._known[0]:
                side = server_side(self._certificates)
                if self._stamp() == stamp:
                    self._known = stamp, side

    def _stamp(self) -> tuple[tuple[int, int, int], ...]:
        found = map(os.stat, msgspec.structs.astuple(self._certificates))
        return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in found)


def server_side_of(pem: str) -> ServerSide:
    """For listening with a certificate of our own; ``pem`` has its key and itself. Nothing is written to a disk."""
    context = _server_context()
    descriptor = os.memfd_create("certificate")
    try:
        os.write(descriptor, pem.encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return ServerSide(context, _first_fingerprint(pem))


def certificates_of(config: ElasticConfig) -> Certificates | None:
    """The certificates that the flags name, None without them.

    They are tried out: a handshake with themselves. Raises UsageError if they cannot work.
    """
    files = {"cert": config.tls_cert, "key": config.tls_key, "ca": config.tls_ca}
    given = {name: str(path.absolute()) for name, path in files.items() if path is not None}
    if not given:
        return None
    for name, path in given.items():
        if not (os.path.isfile(path) and os.access(path, os.R_OK)):
            raise UsageError(f"--elastic-tls-{name}: cannot read {path}")
    certificates = Certificates(**given)
    try:
        _shake_hands(client_context(certificates), server_side(certificates).context)
    except ssl.SSLCertVerificationError as error:
        raise UsageError(f"--elastic-tls-cert {certificates.cert} would not be accepted by the other nodes: "
                         f"{error.verify_message}; it must be signed by --elastic-tls-ca, be valid now, and be "
                         "for servers and clients") from None
    except ssl.SSLError as error:
        raise UsageError(f"--elastic-tls-cert: these certificates do not work: {error.reason or error}") from None
    return certificates


def refusal(error: Exception) -> WireError | None:
    """What a failure of TLS means if trying again is of no use; None if the connection was merely cut off."""
    if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return None
    what = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason or str(error)
    return WireError(f"no TLS connection comes about with who answers there: {what}; is this a coordinator's port, and "
                     "have all nodes the same --elastic-tls flags?")


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nothing to resume, so nothing that could be replayed as early data
    return context


def _load(context: ssl.SSLContext, certificates: Certificates) -> None:
    """Raises UsageError."""
    def ask() -> NoReturn:
        raise UsageError(f"--elastic-tls-key {certificates.key} asks for a passphrase; give a key without one")

    try:
        context.load_cert_chain(certificates.cert, certificates.key, ask)
    except ssl.SSLError as error:
        raise UsageError(f"--elastic-tls-cert {certificates.cert} and --elastic-tls-key {certificates.key} are no "
                         f"certificate and its key in PEM form: {error.reason or error}") from None
    try:
        context.load_verify_locations(certificates.ca)
    except ssl.SSLError as error:
        raise UsageError(f"--elastic-tls-ca {certificates.ca} has no certificate in PEM form: "
                         f"{error.reason or error}") from None
    context.verify_mode = ssl.CERT_REQUIRED


def _first_fingerprint(pem: str) -> bytes:
    # A server sends its own certificate first in the chain, as the file has it.
    start = pem.index(ssl.PEM_HEADER)
    end = pem.index(ssl.PEM_FOOTER, start) + len(ssl.PEM_FOOTER)
    return fingerprint(ssl.PEM_cert_to_DER_cert(pem[start:end]))


def _shake_hands(client_context: ssl.SSLContext, server_context: ssl.SSLContext) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    waiting = [client, server]
    while waiting:
        end = waiting.pop(0)
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            waiting.append(end)
