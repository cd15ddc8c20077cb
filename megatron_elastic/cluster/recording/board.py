"""Board: what is written down, for TensorBoard, where the script's ``--tensorboard-dir`` asks for it.

Megatron's curves are written by the last rank, which may be lost. These are the coordinator's, in a file of its own
beside them, so that TensorBoard shows both as one run: figures of steps, recoveries by part, and events as text.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from megatron_elastic.cluster.recording.curves import Curves, Point

_ARGUMENTS = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
_ARGUMENTS.add_argument("--tensorboard-dir")


def folder_of(arguments: Sequence[str]) -> str | None:
    """Where a script is told to write for TensorBoard; None if it is not, or there is no TensorBoard to write for."""
    try:
        folder: str | None = _ARGUMENTS.parse_known_args(list(arguments))[0].tensorboard_dir
    except argparse.ArgumentError:
        return None  # Megatron's parser will say what is wrong
    return folder if importlib.util.find_spec("tensorboard") is not None else None


def _check_room(folder: str) -> None:
    """Raises OSError where a disk takes nothing: a writer leaves an empty file there, each that is made.

    What is no folder here may be elsewhere, as TensorBoard allows.
    """
    if os.path.isdir(folder):
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"x")


class Board(Curves):
    """``folder``: where the file goes; made when there is something to write."""

    def __init__(self, folder: str, trouble: Callable[[str], None]) -> None:
        self._folder = folder
        self._file: Any = None
        super().__init__("board", "--tensorboard-dir", trouble)

    def _end(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, point: Point) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # which takes a while, and is here for those who ask
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._file is None:
            _check_room(self._folder)
            self._file = EventFileWriter(self._folder, filename_suffix=".elastic")
        values = [Summary.Value(tag=self.PREFIX + name, simple_value=value) for name, value in point.figures.items()]
        if point.kind:
            plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
            text = f"**{point.kind}** {point.text}".encode()
            tensor = TensorProto(dtype=DT_STRING, string_val=[text])
            values.append(Summary.Value(tag=f"{self.PREFIX}events", tensor=tensor, metadata=plugin))
        try:
            self._file.add_event(Event(wall_time=point.time, step=point.step, summary=Summary(value=values)))
            self._file.flush()
        except OSError:
            self._file = None  # it fails for ever after; another one goes on
            raise
