"""Client: the blocking side of a connection, for commands and other programs without an event loop."""

from __future__ import annotations

import random
import socket
import ssl
import time

from megatron_elastic.cluster.wire import proof
from megatron_elastic.cluster.wire.framing import frame, receive_frame
from megatron_elastic.cluster.wire.tcp import tune
from megatron_elastic.cluster.wire.tls import CLOSED, Credentials, client_context, refusal
from megatron_elastic.config import UsageError

_PAUSE = 0.2


def connect(host: str, port: int, credentials: Credentials, limit: float, silence: float) -> ssl.SSLSocket:
    """As ``AsyncWire.connect``, but it is not tried again where nobody listens: a command asks a job that runs.

    The socket's timeout is what was left of ``limit`` seconds. One thread at a time may use it: OpenSSL does not read
    and write at once. Raises WireError if who answers is not this job's coordinator, OSError if nobody does in time,
    UsageError if the certificates do not work.
    """
    deadline = time.monotonic() + limit
    while True:
        try:
            context = client_context(credentials.certificates)
            return _connect(host, port, context, credentials.token, deadline, silence)
        except ConnectionRefusedError:
            raise
        except (OSError, UsageError) as error:  # UsageError: certificates that are being replaced
            if (final := refusal(error)) is not None:
                raise final from None
            pause = _PAUSE * random.uniform(0.5, 1.5)
            if time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)


def _connect(host: str, port: int, context: ssl.SSLContext, token: str, deadline: float,
             silence: float) -> ssl.SSLSocket:
    plain = socket.create_connection((host, port), timeout=max(1e-3, deadline - time.monotonic()))
    tune(plain, silence)
    try:
        plain.settimeout(max(1e-3, deadline - time.monotonic()))  # of each of the few steps that follow
        sock = context.wrap_socket(plain)
    except BaseException:
        plain.close()
        raise
    try:
        certificate = sock.getpeercert(binary_form=True)
        assert certificate is not None, "TLS 1.3 has no servers without a certificate"
        own = proof.ClientProof(_expect(sock), proof.fingerprint(certificate), token)
        sock.sendall(frame(own.frame))
        own.check(_expect(sock))
    except BaseException:
        sock.close()
        raise
    return sock


def _expect(sock: socket.socket) -> bytes:
    payload = receive_frame(sock, proof.LONGEST)
    if payload is None:
        raise ConnectionResetError(CLOSED)
    return payload
