"""Station: one launcher's part in a job: its agent, its line to whoever coordinates, and the coordinator if it is here.

Who coordinates is ``cluster.coordination.office``'s matter. A node that does not does what another says, and looks for
the next one when that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from megatron_elastic.cluster.brief import Brief
from megatron_elastic.cluster.coordination.office import Office
from megatron_elastic.cluster.coordination.race import race
from megatron_elastic.cluster.coordination.session import Letter
from megatron_elastic.cluster.leadership import Leader, StoreError
from megatron_elastic.cluster.messages import FromAgent, Heartbeat, Stop
from megatron_elastic.cluster.node.agent import Agent
from megatron_elastic.cluster.node.exit_signal import ExitSignal
from megatron_elastic.cluster.node.keeper import CannotStart
from megatron_elastic.cluster.node.uplink import ELSEWHERE, Uplink
from megatron_elastic.cluster.protocol import Outcome
from megatron_elastic.cluster.recording.screen import Screen
from megatron_elastic.cluster.wire import AsyncWire, Unsendable, WireError
from megatron_elastic.cluster.wire.address import address_of_own
from megatron_elastic.observe.records import has_finished
from megatron_elastic.power.regulator import restore_left_behind


class Station:
    """Takes part in a job until that is over for this node.

    Args:
        brief: what this node was told.
        exit_signal: learns of the ranks that it is passed on to.
        screen: for lines to people.
        note: prints a line about this node.
    """

    def __init__(self, brief: Brief, exit_signal: ExitSignal, screen: Screen, note: Callable[[str], None]) -> None:
        self._brief = brief
        self._config = brief.config
        self._exit_signal = exit_signal
        self._note = note
        # Where there is a store, it lets nobody lead who is silent for that long.
        silence = brief.config.cut_off if brief.choice.kind == "alone" else brief.config.heartbeat_timeout
        self._uplink = Uplink(brief.config, brief.credentials, silence)
        self._office = Office(brief, self._uplink, screen, note, self._let_go)
        self._agent: Agent | None = None
        self._following: asyncio.Task[None] | None = None
        self._term = 0
        """Of the newest coordinator that this node has heard of."""
        self._followed = ""
        """Where the coordinator is that this node has been in touch with last."""
        self._leader = ""
        """Where that one is, if this node has not been in touch with it."""
        self._gone = False
        """Whether the only process that can coordinate has ended."""

    @property
    def coordinates(self) -> bool:
        """Whether this node does, or has until the end."""
        return self._office.coordinator is not None

    async def run(self) -> Outcome:
        """Take part. Raises CancelledError when this process is to end."""
        outcome = Outcome(False, "interrupted")
        try:
            outcome = await self._serve()
        except asyncio.CancelledError:
            self._note("interrupted: ending all ranks; interrupt again to kill them at once")
        except (CannotStart, WireError) as error:
            outcome = Outcome(False, str(error))
        return outcome

    async def end(self, outcome: Outcome) -> None:
        """End this node's ranks, and all else that was begun here."""
        if (coordinator := self._office.coordinator) is not None:
            coordinator.end(outcome.ok, outcome.reason)
        if self._agent is not None:
            self._agent.stop(Stop(ok=outcome.ok, reason=outcome.reason, code=outcome.code))
            if stubborn := await self._agent.end(patient=outcome.ok):
                self._note(f"ranks {sorted(stubborn)} had not ended although the job was over, and were killed")
        await self._office.close()

    # ---- the way of a job -------------------------------------------------------------------

    async def _serve(self) -> Outcome:
        brief, config, office = self._brief, self._config, self._office
        if brief.begins:
            coordinator = office.begin()
            self._uplink.attach(coordinator, await self._prepare())
        else:
            outcome = await self._join()
            if outcome is not None:
                return outcome
        assert self._agent is not None
        agent = self._agent
        while True:
            if agent.over.done():
                stop = agent.over.result()
                if not stop.again or agent.leaving:
                    return Outcome(stop.ok, stop.reason, stop.code)
                self._note(f"{stop.reason}; it comes again with new ranks")
                await agent.begin_again()
                self._uplink.forget()
                if office.coordinator is not None:
                    self._uplink.attach(office.coordinator, agent)
                self._leader = self._leader or self._followed
            elif office.coordinator is not None:
                await race(office.coordinator.outcome, agent.over, office.change())
                if office.coordinator is not None and office.coordinator.outcome.done():
                    return office.coordinator.outcome.result()
            elif self._gone or not (config.elastic and agent.members.done()):
                return Outcome(False, f"lost the coordinator at {brief.assignment.host}:{brief.port}")
            elif self._leader and self._leader != self._uplink.address:
                leader, self._leader = self._leader, ""
                await self._follow(leader)
            elif brief.choice.kind == "alone" or not await self._look():
                if self._uplink.alone_s > config.start_timeout:
                    return Outcome(False, f"nobody coordinates for {config.start_timeout:g} s "
                                          "(--elastic-start-timeout); ending this node's ranks")
                self._leader = self._followed  # it may still be there, and has something to say to this node

    async def _join(self) -> Outcome | None:
        """Another node: come to who coordinates, and do what it says. An outcome if the job is over with it."""
        brief, limit = self._brief, self._config.start_timeout
        until, shunned = time.monotonic() + limit, ""
        while True:
            if isinstance(found := await self._find(shunned, limit), Outcome):
                return found
            address, wire = found
            try:
                if self._agent is None:
                    if brief.choice.kind != "alone":
                        self._office.listen(wire.local_host)
                    await self._prepare()
            except BaseException:
                wire.close()
                raise
            assert self._agent is not None
            why = await self._follow(address, wire)
            if self._agent.over.done() or (self._config.elastic and self._agent.members.done()):
                return None
            limit = until - time.monotonic()
            if why != ELSEWHERE or limit <= 0:
                return Outcome(False, f"lost the coordinator at {address}: {why}")
            shunned = address

    async def _find(self, shunned: str, limit: float) -> tuple[str, AsyncWire[Letter]] | Outcome:
        """Whoever coordinates, where the first node does or where another does by now. Raises WireError.

        An outcome if nobody does within ``limit`` seconds, or will any more. ``shunned``: where nobody has done so just
        now; another place is looked at before.
        """
        given, run_dir = self._given, self._brief.assignment.run_dir
        if shunned == given and (found := await self._find_noted()) is not None:
            return found
        # It is given all that time: of a thousand nodes that come at once some wait long for an answer.
        trying = asyncio.create_task(self._connect(given, limit))
        try:
            while True:
                await asyncio.wait([trying], timeout=self._config.heartbeat_timeout)
                if not trying.done() and (found := await self._find_noted()) is not None:
                    if not trying.done() or trying.exception() is not None:
                        return found
                    found[1].close()
                if trying.done():
                    return given, trying.result()
                if await asyncio.to_thread(has_finished, run_dir):
                    return Outcome(True, f"the job in {run_dir} has finished: there is nothing to join")
        except TimeoutError as error:
            return Outcome(False, f"{error}; is node 0 started, and its address right?")
        finally:
            trying.cancel()

    async def _find_noted(self) -> tuple[str, AsyncWire[Letter]] | None:
        """Whoever coordinates in the first node's place, if nodes share the run directory."""
        brief = self._brief
        address = await asyncio.to_thread(address_of_own, brief.assignment.run_dir, brief.credentials.token)
        if address is None or (there := f"{address.host}:{address.port}") == self._given:
            return None
        with contextlib.suppress(TimeoutError, WireError):  # a job that is gone has left it
            return there, await self._connect(there, self._config.heartbeat_timeout)
        return None

    async def _connect(self, address: str, limit: float) -> AsyncWire[Letter]:
        host, _, port = address.rpartition(":")
        return await self._uplink.connect(host, int(port), limit)

    @property
    def _given(self) -> str:
        """Where the first node coordinates a job that begins."""
        return f"{self._brief.assignment.host}:{self._brief.port}"

    async def _prepare(self) -> Agent:
        agent = self._agent = Agent(self._brief.assignment, self._tell)
        self._exit_signal.pass_on, self._exit_signal.leave = agent.pass_on, self._leave
        await asyncio.get_running_loop().run_in_executor(None, restore_left_behind, self._note)
        ready = await agent.prepare(self._config.start_timeout)
        if ready.threads > 1:
            self._note(f"the imported modules started {ready.threads - 1} threads; forking ranks may hang. "
                       "MEGATRON_ELASTIC_PRELOAD (module names, commas between) chooses what is imported first")
        if self._brief.choice.kind != "alone":
            self._office.stand(agent)
        return agent

    def _leave(self) -> bool:
        """Let this node's ranks leave, if the others can go on without them; of who coordinates, if another can."""
        agent = self._agent
        if agent is None or not self._config.elastic:
            return False
        if self._office.coordinator is not None:
            agent.leaving = self._office.resign()  # who coordinates next is told so
            return agent.leaving
        if not agent.leaving:  # else somebody has asked for it before
            agent.leave()
        return True

    def _tell(self, message: FromAgent) -> None:
        """Tell whoever coordinates what an agent has to say."""
        assert self._agent is not None
        try:
            self._uplink.tell(message)
        except Unsendable as error:
            self._agent.stop(Stop(ok=False, reason=f"this node cannot tell the coordinator what it has to: {error}"))
        if (recorded := self._uplink.recorded) > 0:
            self._agent.obey(Heartbeat(recorded=recorded))

    async def _follow(self, address: str, wire: AsyncWire[Letter] | None = None) -> str:
        """Do what the coordinator at ``address`` says until it is gone, or another is there. Returns why it is gone."""
        agent = self._agent
        assert agent is not None
        self._followed = address
        host, _, port = address.rpartition(":")
        why = "another coordinates"

        async def follow(wire: AsyncWire[Letter] | None) -> None:
            nonlocal why
            try:
                wire = wire or await self._connect(address, self._config.heartbeat_timeout)
                why = await self._uplink.follow(wire, host, int(port), agent)
            except (TimeoutError, WireError) as error:
                why = str(error)
                self._gone = self._brief.choice.kind == "alone" and isinstance(error.__cause__, ConnectionRefusedError)

        self._following = asyncio.create_task(follow(wire))
        await race(self._following, agent.over, self._another(address))
        if not self._following.cancelled():
            self._following.result()  # raises what nobody has foreseen
        return why

    async def _another(self, address: str) -> Leader:
        """Somebody coordinates who is not at ``address``. Who coordinates there anew has closed its connections."""
        assert self._agent is not None
        while True:
            store = await asyncio.shield(self._office.store)
            if address and not self._office.hears(store):
                # It would have to ask again and again: it looks for another when it has lost this one.
                await self._office.change()
                continue
            self._term = max(self._term, self._agent.members.result().term)
            following = asyncio.ensure_future(store.followed(self._term))
            await race(following, self._office.change())
            if following.cancelled():
                continue
            try:
                leader = following.result()
            except StoreError as error:  # it is asked again, but not at once
                self._note(f"--elastic-store: {error}")
                await asyncio.sleep(self._config.heartbeat_timeout)
                continue
            self._term = leader.term
            if leader.address != address:
                self._leader = leader.address
                return leader

    async def _look(self) -> bool:
        """Wait until somebody else coordinates. Returns whether somebody does, within some seconds."""
        assert self._agent is not None
        limit = asyncio.ensure_future(asyncio.sleep(2 * self._config.heartbeat_timeout))
        await race(self._another(""), limit, self._agent.over, self._office.change())
        return limit.cancelled()

    async def _let_go(self) -> str:
        """This node coordinates now: nothing is done for another. Returns where that one is, or was."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        return self._followed
