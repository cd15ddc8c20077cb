"""Wire: the control connections: framed messages, encrypted, between ends that have proven the job's token."""

from megatron_elastic.cluster.wire.client import connect
from megatron_elastic.cluster.wire.connection import AsyncWire, Broken
from megatron_elastic.cluster.wire.framing import (
    FRAME_LIMIT,
    Unsendable,
    WireError,
    decode,
    encode,
    frame,
    pack,
    read_frame,
    receive_frame,
)
from megatron_elastic.cluster.wire.tcp import listen, tune
from megatron_elastic.cluster.wire.tls import Certificates, Credentials
from megatron_elastic.cluster.wire.token import TOKEN_VARIABLE

__all__ = [
    "FRAME_LIMIT",
    "TOKEN_VARIABLE",
    "AsyncWire",
    "Broken",
    "Certificates",
    "Credentials",
    "Unsendable",
    "WireError",
    "connect",
    "decode",
    "encode",
    "frame",
    "listen",
    "pack",
    "read_frame",
    "receive_frame",
    "tune",
]
