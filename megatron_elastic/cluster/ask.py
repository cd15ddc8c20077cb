"""Ask: a person's request to a running job, from its run directory, and the answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.messages import Answer, Drain, Scale
from megatron_elastic.cluster.wire.address import FILE, read_address

_LIMIT = 10.0
_decoder = msgspec.msgpack.Decoder(Answer)


def ask(run_dir: Path, request: Scale | Drain) -> int:
    """Ask, and print the answer as JSON; return the exit code: 0 it will be done, 1 it will not, 2 there is no job."""
    try:
        address = read_address(run_dir)
    except (OSError, ValueError):
        print(f"megatron-elastic: error: no elastic job runs in {run_dir} (there is no readable {FILE})",
              file=sys.stderr)
        return 2
    try:
        with wire.connect(address.host, address.port, address.credentials, _LIMIT, _LIMIT) as sock:
            sock.settimeout(_LIMIT)
            sock.sendall(wire.encode(request))
            payload = wire.receive_frame(sock)
        if payload is None:
            raise wire.WireError("it closed the connection")
        answer = wire.decode(payload, _decoder)
    except (OSError, wire.WireError) as error:
        print(f"megatron-elastic: error: the job of {run_dir} does not answer: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"ok": answer.ok, "text": answer.text}))
    return 0 if answer.ok else 1
