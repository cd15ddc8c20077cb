"""Scale: ``megatron-elastic scale``. Asks a running job for another shape."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.messages import Answer, Scale
from megatron_elastic.cluster.wire.address import FILE, Address, read_address

_LIMIT = 10.0
_decoder = msgspec.msgpack.Decoder(Answer)


def main(argv: Sequence[str]) -> int:
    """Ask; return the exit code: 0 it will be done, 1 it will not, 2 bad flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic scale",
        description="Ask a running job for another number of pipeline stages. Layers move while training goes on.",
        epilog="example:\n  megatron-elastic scale runs/20261121-120000 --pp 2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the job's run directory, on its first node")
    parser.add_argument("--pp", type=int, required=True, metavar="N", help="pipeline stages")
    options = parser.parse_args(argv)
    try:
        address = read_address(options.run_dir)
    except (OSError, ValueError):
        print(f"megatron-elastic: error: no elastic job runs in {options.run_dir} (there is no readable {FILE})",
              file=sys.stderr)
        return 2
    try:
        answer = _ask(address, Scale(stages=options.pp))
    except (OSError, wire.WireError) as error:
        print(f"megatron-elastic: error: the job of {options.run_dir} does not answer: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"ok": answer.ok, "text": answer.text}))
    return 0 if answer.ok else 1


def _ask(address: Address, message: Scale) -> Answer:
    with wire.connect(address.host, address.port, address.credentials, _LIMIT, _LIMIT) as sock:
        sock.settimeout(_LIMIT)
        sock.sendall(wire.encode(message))
        payload = wire.receive_frame(sock)
    if payload is None:
        raise wire.WireError("it closed the connection")
    return wire.decode(payload, _decoder)
