"""Brief: what one node was told of a job, by its command line and its environment."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_elastic.cluster.leadership import Choice
from megatron_elastic.cluster.node.assignment import Assignment
from megatron_elastic.cluster.wire import Credentials
from megatron_elastic.config import ElasticConfig


@dataclass(frozen=True, slots=True)
class Brief:
    """A node's. ``port`` 0 means any free one."""

    assignment: Assignment
    config: ElasticConfig
    credentials: Credentials
    choice: Choice
    """Of the store."""
    port: int
    """Where the first node coordinates, on ``assignment.host``."""
    begins: bool
    """Whether this node begins the job, and coordinates it first."""
