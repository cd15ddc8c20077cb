"""Assignment: what one node runs, and where: its ranks, their files and their environments."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from megatron_elastic.cluster.launch.output import Console
from megatron_elastic.cluster.messages import Launch
from megatron_elastic.cluster.program import Program

END_LIMIT = 10.0
"""Seconds that ranks of a failed job usually have to end, before they are killed, and that the zygote has."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What this node runs and where."""

    program: Program
    nodes: int
    node_rank: int
    ranks_per_node: int
    run_dir: Path
    host: str
    """Address of the first node, as every rank can reach it: MASTER_ADDR."""
    heartbeat_timeout: float
    grace: float
    """Seconds that ranks have to end once the job is over, before they are killed."""
    look_every: float
    """Seconds between two looks for ranks that are at a standstill which no signal caused."""
    elastic: bool = False
    """Whether others train on without its ranks."""
    tells_paces: bool = False
    """Whether the coordinator is told how fast ranks are."""
    spares: int = 0
    """Of the ranks of all nodes, the last ones: they join when they are needed."""
    actuator: str | None = None
    """What sets clocks, if they are planned."""
    console: Console = field(default_factory=Console)
    """What is shown of what ranks print."""
    name: str = "none"
    """torchrun's run id."""
    end_limit: float = END_LIMIT
    """Seconds that ranks of a failed job have to end, before they are killed."""

    @property
    def world_size(self) -> int:
        """Ranks that the job begins with, if this is one of its first nodes."""
        return self.nodes * self.ranks_per_node - self.spares

    @property
    def ranks(self) -> list[int]:
        """Global ids of this node's first ranks."""
        first = self.node_rank * self.ranks_per_node
        return list(range(first, first + self.ranks_per_node))

    @property
    def log_dir(self) -> Path:
        """Where each rank's output goes."""
        return self.run_dir / "logs"

    def log(self, rank: int) -> Path:
        """Output of one rank."""
        return self.log_dir / f"rank{rank}.log"

    def errors(self, rank: int, local_rank: int) -> Path:
        """Where its stderr goes."""
        return self.log_dir / f"rank{rank}.err.log" if self.console.splits(local_rank) else self.log(rank)

    def stack(self, rank: int) -> Path:
        """Where is written down what a rank did that hung."""
        return self.run_dir / "stacks" / f"rank{rank}.txt"

    def environment(self, rank: int, local_rank: int, launch: Launch) -> dict[str, str]:
        """What a rank finds in its environment besides the launcher's; the names are torchrun's."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(launch.world_size),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "ROLE_NAME": self.console.role,
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(launch.world_size),
            "TORCHELASTIC_RUN_ID": self.name,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(launch.torch_port),
            "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
            "MEGATRON_ELASTIC_RUN_DIR": str(self.run_dir),
        }
