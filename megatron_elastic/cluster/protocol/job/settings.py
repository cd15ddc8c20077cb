"""Settings: what of a job's configuration the protocol looks at."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What of ``config.ElasticConfig`` the protocol looks at; times in seconds."""

    elastic: bool
    respawn: bool
    replay: str
    profile_file: str | None
    """Where it is written what units cost, if it is."""
    start_timeout: float
    suspect_timeout: float
    report_timeout: float
    wait_timeout: float
    heartbeat_timeout: float
    hang_timeout: float = 5.0
    redo: str = "lost"
    on_error: str = "recover"
    slow: str = "share"
    spares: int = 0
    policy: str = "elastic"
    schedule: str = "1f1b"
    places: bool = False
    """Whether a search of orders may place chunks otherwise."""
    dvfs: str | None = None
