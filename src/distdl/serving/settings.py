"""The settings of the server. This file goes into every model folder."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

TOKEN = "DISTDL_SERVE_TOKEN"


class Settings(BaseModel):
    """`serve.KEY=VALUE` on the command line."""

    model_config = ConfigDict(extra="forbid")
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    max_batch: int = Field(32, ge=1, le=1024)
    max_delay_ms: float = Field(5, ge=0, le=1000)
    max_queue: int = Field(128, ge=1, le=100_000)
    timeout_s: float = Field(30, gt=0, le=3600)
    drain_s: int = Field(25, ge=0, le=3600)
    token: str | None = Field(None, min_length=1)
    no_token: bool = False

    @property
    def local(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


class WrongSettings(ValueError):
    """(name, what is wrong with it) for each of `problems`."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        super().__init__("\n".join(f"{name}: {what}" for name, what in problems))
        self.problems = problems


def settings_of(words: Sequence[str]) -> Settings:
    """Reads `serve.KEY=VALUE` words; the token may also be in the environment.

    Raises:
        WrongSettings: An unknown key, a wrong value, or a token is required.
    """
    values: dict[str, Any] = {"token": os.environ.get(TOKEN)}
    problems = []
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("serve.") and equals:
            values[name.removeprefix("serve.")] = None if value == "null" else value
        else:
            problems.append((name, "is not a setting: write serve.KEY=VALUE"))
    try:
        settings = Settings(**values)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            must = item["msg"].removeprefix("Input should be ").split(", unable")[0]
            unknown = item["type"] == "extra_forbidden"
            what = "is not a setting" if unknown else f"must be {must}, not {item['input']!r:.60}"
            problems.append((f"serve.{item['loc'][0]}", what))
    if not problems and not (settings.local or settings.token or settings.no_token):
        what = f"is required, since others can reach {settings.host}: set {TOKEN}, or "
        what += "serve.no_token=true if a platform in front of it authenticates"
        problems.append(("serve.token", what))
    if problems:
        raise WrongSettings(problems)
    return settings
