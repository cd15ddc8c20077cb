"""A coordinator's door and nothing behind it: each guest that says Scale is answered with the number it said.

``door.py FILES PATIENCE [--elastic-tls-... FILE]``: at most FILES files may be open, 0 for as many as there may be
anyway; who knocks has PATIENCE seconds. Prints its port, then what the door says; ends with its standard input, and
says how many guests it had. An error that reaches the event loop, which ends a job, is printed as ERROR.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys

from megatron_elastic.cluster.messages import Answer, Scale
from megatron_elastic.cluster.wire import AsyncWire, Credentials, WireError
from megatron_elastic.cluster.wire.door import Door
from megatron_elastic.cluster.wire.tls import certificates_of
from megatron_elastic.cluster.wire.token import given_token
from megatron_elastic.config import ElasticConfig, add_elastic_arguments
from tests.control.any_message import AnyMessage, any_message


def say(line: str) -> None:
    print(line, flush=True)


async def main(files: int, patience: float, flags: list[str]) -> None:
    guests = 0

    async def serve(wire: AsyncWire[AnyMessage]) -> None:
        nonlocal guests
        guests += 1
        try:
            while (message := await wire.receive()) is not None:
                assert isinstance(message, Scale)
                wire.send(Answer(ok=True, text=str(message.stages)))
        except WireError as error:
            say(f"sent a guest away: {error}")

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: say(f"ERROR {context}"))
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files // 2, files))
    config = ElasticConfig.from_args(add_elastic_arguments(argparse.ArgumentParser()).parse_args(flags))
    credentials = Credentials(given_token(os.environ), certificates_of(config))
    door = Door(credentials, any_message, serve, silence=10, say=say, patience=patience)
    say(str(door.open("127.0.0.1", 0)))
    over = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), over.set)
    await over.wait()
    await door.close(timeout=2)
    say(f"{guests} guests")


asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
