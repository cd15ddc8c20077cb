"""Proof: how both ends of a TLS connection show that they know the token, without telling it.

    server -> client: a random challenge
    client -> server: a random challenge of its own, and its proof
    server -> client: its proof, or nothing (an empty frame) if the client's was wrong

A proof is HMAC-SHA256, keyed with the token, of the role, both challenges and the fingerprint of the server's
certificate. So it is worth nothing in another connection (other challenges), for the other role, or when somebody
between the two has ended the TLS connection of each (another certificate). The client proves first: who does not know
the token never gets anything from a server to try tokens on.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from megatron_elastic.cluster.wire.framing import WireError
from megatron_elastic.cluster.wire.token import TOKEN_VARIABLE

LONGEST = 64
"""Bytes of the longest frame before both proofs have been given."""
_CHALLENGE = 32
_CLIENT = b"megatron_elastic 1 client"
_SERVER = b"megatron_elastic 1 server"
REFUSED = b""
"""What a server sends instead of its proof."""


def fingerprint(certificate: bytes) -> bytes:
    """SHA-256 of a certificate in DER form."""
    return hashlib.sha256(certificate).digest()


def challenge() -> bytes:
    """What a server sends first."""
    return secrets.token_bytes(_CHALLENGE)


class ClientProof:
    """The client's side of one connection, after ``received``, the server's challenge (None: there was none).

    Raises WireError if that is no challenge.
    """

    def __init__(self, received: bytes | None, certificate: bytes, token: str) -> None:
        if received is None or len(received) != _CHALLENGE:
            raise WireError("the port does not answer like a coordinator of megatron_elastic")
        own = challenge()
        challenges = received + own
        self.frame = own + _proof(token, _CLIENT, challenges, certificate)
        """What to send."""
        self._expected = _proof(token, _SERVER, challenges, certificate)

    def check(self, answer: bytes) -> None:
        """Look at the server's proof. Raises WireError if it is wrong."""
        if answer == REFUSED:
            raise WireError(f"the coordinator refuses the job token ({TOKEN_VARIABLE}) of this node; is this another "
                            "job's port, or another node's token?")
        if not hmac.compare_digest(answer, self._expected):
            raise WireError(f"who answers there does not know the job token ({TOKEN_VARIABLE}), or is not the one that "
                            "the connection is encrypted for; is somebody in between?")


def answer_client(sent: bytes, received: bytes | None, certificate: bytes, token: str) -> bytes:
    """The server's proof, if what it ``received`` for the challenge that it ``sent`` is right. Raises WireError."""
    if received is None:
        raise WireError("it left without a proof that it knows the job token")
    challenges, proof = sent + received[:_CHALLENGE], received[_CHALLENGE:]
    if not hmac.compare_digest(proof, _proof(token, _CLIENT, challenges, certificate)):
        raise WireError(f"it does not know the job token ({TOKEN_VARIABLE})")
    return _proof(token, _SERVER, challenges, certificate)


def _proof(token: str, role: bytes, challenges: bytes, certificate: bytes) -> bytes:
    # Fields of fixed length (the roles are equally long), so that no two of them can be shifted into each other.
    return hmac.new(token.encode(), role + challenges + certificate, hashlib.sha256).digest()
