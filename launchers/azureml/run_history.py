"""The log files of a job while it writes them, by the same REST calls as the SDK's `jobs.stream`.

`jobs.stream` prints to stdout, downloads each file again and again, and says nothing while a job is
queued (https://github.com/Azure/azure-cli/issues/27363).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

from distdl.launchers.azureml.client import Connection, azure_errors

# user_logs/std_log_process_00.txt of rank 0, ..01.txt of rank 1; std_log.txt of one process.
USER_LOG = re.compile(r"user_logs/std_log(?:_process_(\d+))?\.txt")


class RunHistory:
    """Azure ML's service that knows a job's status and where its log files are."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @functools.cached_property
    def _runs(self) -> str:
        """The address below which the workspace's runs are."""
        client, workspace = self._connection.client, self._connection.workspace
        discovery = client.workspaces.get(workspace.name).discovery_url
        addresses = json.loads(self._files.send_request(_get(discovery)).text())
        return f"{addresses['api'].rstrip('/')}/history/v1.0{workspace.arm_id}/runs"

    @functools.cached_property
    def _service(self) -> Any:
        """For requests as whoever is signed in."""
        from azure.core import PipelineClient
        from azure.core.pipeline import policies

        sign = policies.BearerTokenCredentialPolicy(
            self._connection.credential, self._connection.scope
        )
        retry = policies.RetryPolicy()
        return PipelineClient("", policies=[retry, sign])

    @functools.cached_property
    def _files(self) -> Any:
        """For addresses that carry their own signature."""
        from azure.core import PipelineClient
        from azure.core.pipeline import policies

        return PipelineClient("", policies=[policies.RetryPolicy()])

    def details(self, job: str) -> dict[str, Any]:
        """`status`, `logFiles` (name -> address), `error`, and more.

        Raises:
            UserError: Azure refuses, or is out of reach.
        """
        with azure_errors():
            response = self._service.send_request(_get(f"{self._runs}/{job}/details"))
            response.raise_for_status()
            return response.json()

    def children(self, job: str) -> Iterator[dict[str, Any]]:
        """The trials of a sweep that have begun: `runId`, `status`, `tags`.

        Raises:
            UserError: As of `details`.
        """
        address: str | None = f"{self._runs}/{job}/children"
        while address:
            with azure_errors():
                response = self._service.send_request(_get(address))
                response.raise_for_status()
                answer = response.json()
            yield from answer.get("value") or ()
            address = answer.get("nextLink")

    def read(self, address: str, start: int) -> bytes | None:
        """What a file has from a byte on; None if it is shorter than that by now."""
        with azure_errors():
            response = self._files.send_request(_get(address, {"Range": f"bytes={start}-"}))
            if response.status_code == 416:  # nothing from there on
                size = response.headers.get("Content-Range", "").rpartition("/")[2]
                return None if size.isdigit() and int(size) < start else b""
            response.raise_for_status()
            content = response.read()
            # A server that does not know ranges sends everything.
            return content if response.status_code == 206 else content[start:]


class LogFile:
    """One growing file; `new` gives the lines that have been finished since the last time."""

    def __init__(self, history: RunHistory) -> None:
        self._history = history
        self._place, self._rest = 0, b""

    def new(self, address: str) -> list[str]:
        content = self._history.read(address, self._place)
        if content is None:  # Azure started the job again, and its log from the beginning
            self._place, self._rest = 0, b""
            content = self._history.read(address, 0) or b""
        self._place += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        return [line.decode(errors="replace").rstrip("\r") for line in lines]

    def rest(self) -> list[str]:
        """A last line that was never finished."""
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="replace")] if rest else []


def by_rank(files: dict[str, str]) -> dict[int, str]:
    """rank -> address of its output."""
    found = {}
    for name, address in files.items():
        match = USER_LOG.fullmatch(name)
        if match is not None:
            found[int(match[1] or 0)] = address
    return dict(sorted(found.items()))


def _get(address: str, headers: dict[str, str] | None = None) -> Any:
    from azure.core.rest import HttpRequest

    return HttpRequest("GET", address, headers=headers or {})
