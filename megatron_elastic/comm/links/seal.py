"""Seal: the proof that a message over a link comes from a rank of this job, is for this rank, and is new.

A sealed message begins with a nonce, ``source:20 | destination:20 | number:56``, and AES-GCM's code over its tag and
its bytes, under the key of the job. Nothing is encrypted. No nonce comes twice: ranks' numbers are never used again,
and each rank numbers its messages to each peer.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM

from megatron_elastic.comm.tag import RANKS, SOURCE_BITS, source_of

_NONCE, _CODE = 12, 16
HEAD = _NONCE + _CODE
"""Bytes that a sealed message is longer."""
KEY = 32
"""Bytes of a job's key."""
WINDOW = 1024
"""A message that is older than so many newer ones of its source is refused."""
_NUMBER_BITS = 8 * _NONCE - 2 * SOURCE_BITS
_WINDOW_MASK = (1 << WINDOW) - 1


class Seal:
    """One rank's. Raises ValueError for a key of another length.

    Args:
        rank: this rank.
        key: the job's.
    """

    def __init__(self, rank: int, key: bytes) -> None:
        self._rank = rank
        self._key = AES256(key)
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._came: dict[int, tuple[int, int]] = {}
        """By source: the highest number that has come, and which of the ``WINDOW`` up to it; it is the lowest bit."""

    def close(self, peer: int, tag: int, payload: torch.Tensor) -> torch.Tensor:
        """A copy of the bytes, sealed for ``peer``."""
        self._sent[peer] += 1
        number = self._sent[peer]
        nonce = ((self._rank << SOURCE_BITS | peer) << _NUMBER_BITS | number).to_bytes(_NONCE, "big")
        sealed = torch.empty(HEAD + payload.numel(), dtype=torch.uint8)
        sealed[HEAD:] = payload
        memory = memoryview(sealed.numpy())  # type: ignore[arg-type]  # numpy does not say that it is one
        coder = Cipher(self._key, GCM(nonce)).encryptor()
        _authenticate(coder, tag, memory)
        memory[:HEAD] = nonce + coder.tag
        return sealed

    def opens(self, tag: int, sealed: torch.Tensor) -> bool:
        """Whether a message with this tag is what a rank of the job has sealed for this one, and comes first now."""
        memory = memoryview(sealed.numpy())  # type: ignore[arg-type]  # numpy does not say that it is one
        if len(memory) < HEAD:
            return False
        nonce = bytes(memory[:_NONCE])
        ranks, number = divmod(int.from_bytes(nonce, "big"), 1 << _NUMBER_BITS)
        source, destination = divmod(ranks, RANKS)
        if destination != self._rank or source != source_of(tag) or not self._is_new(source, number):
            return False
        coder = Cipher(self._key, GCM(nonce, bytes(memory[_NONCE:HEAD]))).decryptor()
        try:
            _authenticate(coder, tag, memory)
        except InvalidTag:
            return False
        self._note(source, number)
        return True

    def _is_new(self, source: int, number: int) -> bool:
        highest, seen = self._came.get(source, (0, 0))
        age = highest - number
        return age < 0 or (age < WINDOW and not seen >> age & 1)

    def _note(self, source: int, number: int) -> None:
        highest, seen = self._came.get(source, (0, 0))
        if number > highest:
            seen = seen << min(number - highest, WINDOW) & _WINDOW_MASK
            highest = number
        self._came[source] = highest, seen | 1 << highest - number


def _authenticate(coder: Any, tag: int, sealed: memoryview) -> None:
    """Make or check the code. Raises InvalidTag."""
    coder.authenticate_additional_data(tag.to_bytes(8, "big"))
    coder.authenticate_additional_data(sealed[HEAD:])
    coder.finalize()
