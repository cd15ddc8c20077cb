"""Faults: what each kind does to a world."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_elastic.cluster.messages import Failed, Paced, Scale
from tests.simulation.ranks.rank import Rank
from tests.simulation.scenario import SAYINGS, Fault
from tests.simulation.shell.agent import Agent
from tests.simulation.shell.link import Link

if TYPE_CHECKING:
    from tests.simulation.world import World


_PACES = (9.0, 10.0, 11.0, 21.0, 400.0)
"""Milliseconds that a grain takes on some rank."""


def happen(world: World, fault: Fault) -> None:
    """Let a fault happen now. Nothing does if it has no victim."""
    alive = [rank for rank in world.ranks.values() if rank.alive and not rank.done]
    if not alive:
        return
    rank = alive[fault.victim % len(alive)]
    other = alive[fault.more % len(alive)]
    if fault.moment in SAYINGS and fault.victim % 3 and world.speaker in alive:
        rank = world.speaker
    seconds = (0.01, 0.1, 0.5, 0.9, 1.5, 3.0, 9.0, 70.0)[fault.more % 8]
    match fault.what:
        case "kill":
            world.kill(rank, (-9, -11, -6)[fault.more % 3])
        case "kill two":
            world.kill(rank)
            world.kill(other)
        case "kill newcomer":
            new = [each for each in alive if each.rank >= world.scenario.size]
            world.kill((new or alive)[fault.victim % len(new or alive)])
        case "stop":
            world.stop(rank, seconds)
        case "busy":
            rank.busy_until = max(rank.busy_until, world.now + seconds)
        case "hang":
            rank.busy_until = world.now + 400.0
            world.last_fault = rank.busy_until
        case "link":
            if rank is not other:
                world.checks.broken(rank.rank, other.rank)
                rank.transport.note_broken(other.rank)
                if fault.victim % 3:
                    delay = world.delay(0.3 if fault.more % 3 == 0 else 0.001)
                    world.after(delay, other.transport.note_broken, rank.rank)
        case "suspect":
            if rank is not other and rank.want == ():
                world.accuse(rank, [other.rank])
        case "node lost":
            _lose(world, rank.agent, fault.more % 2 == 0)
        case "partition":
            _cut(world, rank.agent, seconds)
        case "coordinator":
            _fell(world)
        case "depose":
            _depose(world, (0, 1, 2, 2)[fault.victim % 4], seconds)
        case "join":
            agent = Agent(world, len(world.agents), (1, world.scenario.tp, 2, 3)[fault.more % 4])
            world.agents.append(agent)
            world.after(0.0, agent.introduce)
        case "drain":
            rank.agent.drain()
        case "pace":
            _pace(world, fault.more)
        case "scale":
            world.ask(_shape(fault.more))
        case "flip":
            world.damage(rank, fault.more)
        case "clock":
            (rank.agent if fault.more % 2 else world.coordinator or rank.agent).clock += (fault.more % 2000) - 1000.0
        case "trouble":
            world.trouble(fatal=fault.more % 4 == 0)
        case "exit":
            world.checks.excuse("exit code")
            world.kill(rank, fault.more % 2)
        case "fail":
            _fail(world, rank, fault.more % 4 == 0)


def _shape(dice: int) -> Scale:
    """What somebody asks for."""
    many = 1 + dice % 3
    match dice // 3 % 7:
        case 0:
            return Scale(width=many)
        case 1:
            return Scale(ranks=2 * many)
        case 2:
            return Scale(stages=1 + dice // 15 % 2, width=many)
        case 3 | 4:
            size = (1, 2, 4)[many - 1]
            return (Scale(ep=size), Scale(cp=size), Scale(tp=size))[dice // 21 % 3]
    return Scale(stages=many)


def _pace(world: World, dice: int) -> None:
    """Ranks have become slow, or fast again; their agents notice."""
    for agent in world.agents:
        paces: dict[int, dict[int, float]] = {}
        for rank in agent.running:
            paces.setdefault(rank.standing.epoch, {})[rank.rank] = _PACES[(rank.rank + dice) % len(_PACES)]
        for epoch, told in paces.items():
            agent.tell(Paced(epoch=epoch, paces=told))


def _fail(world: World, rank: Rank, hopeless: bool) -> None:
    """The program raises: something that concerns this rank alone, or would come again."""
    now = rank.standing
    world.checks.excuse("exit code")  # whom it told may be gone
    hopeless = hopeless or rank.tenure is None
    if hopeless:
        world.checks.excuse("raised")
    step = None if hopeless else now.step
    rank.control.send(Failed(rank=rank.rank, traceback="simulated", epoch=now.epoch, step=step))
    world.kill(rank, 1)


def _lose(world: World, agent: Agent, machine: bool) -> None:
    """A connection breaks for good, or the whole machine with it."""
    link = agent.link
    if link is None or link.local or not link.open:
        return
    link.close()
    if machine:
        agent.die()
    else:
        agent.end()
    link.coordinator.lose(link, "lost")


def _cut(world: World, agent: Agent, seconds: float) -> None:
    """Nothing gets through between agent and coordinator for a while."""
    link = agent.link
    if link is None or link.local or not link.open or agent.cut_until > world.now:
        return
    agent.cut_until = world.now + seconds
    if seconds > 2.5:
        world.after(2.5 + world.rng.random() * 0.4, _silent, world, link)
        world.last_fault = world.now + seconds


def _silent(world: World, link: Link) -> None:
    if link.open:
        link.silence()
        link.coordinator.lose(link, "silent")
        world.at(min(link.agent.cut_until, world.now + 8.0), _heard, link)


def _heard(link: Link) -> None:
    """An agent hears that it was given up, if it is not another coordinator's by now."""
    if link.agent.link is link:
        link.agent.end()


# ---- who coordinates -------------------------------------------------------------------------------


def _fell(world: World) -> None:
    """The coordinator's process ends, and its machine if it is on one that has ranks."""
    coordinator = world.coordinator
    if coordinator is None:
        return
    place = coordinator.place
    coordinator.end()
    if place is not None:
        place.die()
    world.leadership.vacant(_election(world), place)


def _depose(world: World, how: int, seconds: float) -> None:
    """The coordinator lives on, and the store lets another lead. It may learn that when the other leads already."""
    coordinator = world.coordinator
    if coordinator is None or coordinator.term == 0:
        return
    place = coordinator.place
    if how and place is not None and (how == 1 or seconds < 1.0):
        for link in coordinator.links.values():
            if not link.local:
                link.close()
        place.cut_until = world.now + seconds
    if how == 0:  # it gives back its lease, and may get it again
        coordinator.step_down()
        world.leadership.vacant(_election(world) - 1.0 if seconds < 1.0 else _election(world), None)
    elif how == 1 or world.scenario.shared:  # it is cut off from all others, and steps down in time
        world.after(0.75, coordinator.step_down)
        world.leadership.vacant(_election(world), place)
    else:  # it was stopped for a while, and does not know at once; nothing keeps its lines out of a shared file then
        world.after(0.75 + 5 * world.rng.random(), coordinator.step_down)
        world.leadership.vacant(_election(world), place)


def _election(world: World) -> float:
    """Seconds until another leads."""
    return 1.0 + 0.6 * world.rng.random()
