"""Token: the secret that every process of one job knows, and nobody else."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from megatron_elastic.config import UsageError

TOKEN_VARIABLE = "MEGATRON_ELASTIC_TOKEN"
"""Environment variable with the job's token."""
SHORTEST = 32
"""Characters. Whoever lures a client to a port of its own can try out tokens offline; 32 hex digits are 128 bits."""


def token_of(env: Mapping[str, str]) -> str | None:
    """The token that ``env`` names, None without one. Raises UsageError if it is no text, or too short for a secret."""
    token = env.get(TOKEN_VARIABLE)
    if not token:
        return None
    if len(token) < SHORTEST:
        raise UsageError(f"{TOKEN_VARIABLE} has {len(token)} characters, which can be guessed; give at least "
                         f"{SHORTEST}, the same on every node, for instance from `openssl rand -hex 32`")
    try:
        token.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{TOKEN_VARIABLE} has bytes that are no UTF-8; give text, for instance from "
                         "`openssl rand -hex 32`") from None
    return token


def given_token(env: Mapping[str, str]) -> str:
    """The token of a job that several launchers start, so that it must be given. Raises UsageError."""
    token = token_of(env)
    if token is None:
        raise UsageError(f"several nodes need the environment variable {TOKEN_VARIABLE}: the same secret on every "
                         "node, for instance from `openssl rand -hex 32`")
    return token


def make_token() -> str:
    """A new token, for a job that one launcher starts."""
    return secrets.token_hex(SHORTEST)
