"""The settings of the server. This file goes into every model folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Self

from pydantic import BaseModel, Field, model_validator

TOKEN = "DISTDL_SERVE_TOKEN"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Settings(BaseModel, extra="forbid", alias_generator="serve.{}".format):
    """`serve.KEY=VALUE` on the command line."""

    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    max_batch: int = Field(32, ge=1, le=1024)
    max_delay_ms: float = Field(5, ge=0, le=1000)
    max_queue: int = Field(128, ge=1, le=100_000)
    timeout_s: float = Field(30, gt=0, le=3600)
    token: str | None = Field(None, min_length=1)
    no_token: bool = False

    @model_validator(mode="after")
    def _others_need_a_token(self) -> Self:
        if not (self.token or self.no_token or self.host in LOOPBACK):
            remedy = f"set {TOKEN}, or serve.no_token=true behind a platform that authenticates"
            raise ValueError(f"serve.token is required, others can reach {self.host}: {remedy}")
        return self


def values_of(words: Sequence[str]) -> dict[str, Any]:
    """What `serve.KEY=VALUE` words set; the token may also be in the environment."""
    values: dict[str, Any] = {"serve.token": os.environ.get(TOKEN)}
    for word in words:
        name, _, value = word.partition("=")
        values[name] = None if value == "null" else value
    return values
