"""One agent as far as leadership goes: campaigns whenever it can, and does what it reads on stdin.

Orders are JSON objects, one a line. So is what happens: ``port`` first, then ``opened``, ``led``, ``follows``,
``deposed``, ``did``, each with the system's monotonic clock (``at``).

    python -m tests.cluster_programs.candidate '{"store": "auto", "nodes": 1, "job": "a", "limit": 1, "address": "a:1",
        "host": "127.0.0.1"}'
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from megatron_elastic.cluster.leadership import Deposed, Durable, Place, Store, make, parse, reserve


def tell(**what: Any) -> None:
    print(json.dumps({**what, "at": time.monotonic()}), flush=True)


async def campaign(store: Store, address: str) -> None:
    while True:
        term = await store.lead(address)
        tell(led=term)
        await store.deposed(term)
        tell(deposed=term)


async def follow(store: Store) -> None:
    term = 0
    while True:
        leader = await store.followed(term)
        term = leader.term
        tell(follows=term, address=leader.address)


async def obey(store: Store, order: dict[str, Any]) -> None:
    started = time.monotonic()
    match order["do"]:
        case "record":
            durable = Durable(order["term"], order["epoch"], order["step"])
            try:
                await store.record(durable)
                tell(did="record", took=time.monotonic() - started)
            except Deposed as error:
                tell(did="record", refused=str(error))
        case "recall":
            found = await store.recall()
            tell(did="recall", found=None if found is None else [found.term, found.epoch, found.step])
        case "replace":
            await store.replace(order["lost"], order["by"])  # type: ignore[attr-defined]
            tell(did="replace")


async def main(given: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    choice = parse(given["store"], given["nodes"])
    place = None
    if choice.kind == "embedded":
        listening = reserve()
        port = listening.getsockname()[1]
        tell(port=port)
        members = tuple(json.loads(await orders.readline()))
        me = f"{given['host']}:{port}"
        if me in members:
            place = Place(members, given["token"], me, listening)
        else:
            listening.close()
            place = Place(members, given["token"])
    store = make(choice, given["job"], given["limit"], place=place)
    await store.open()
    tell(opened=True)
    tasks = [asyncio.create_task(campaign(store, given["address"])), asyncio.create_task(follow(store))]
    while line := await orders.readline():
        await obey(store, json.loads(line))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
