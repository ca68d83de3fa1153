"""The log files of a job while it writes them, by the same REST calls as the SDK's `jobs.stream`.

`jobs.stream` prints to stdout, downloads each file again and again, and says nothing while a job is
queued (https://github.com/Azure/azure-cli/issues/27363).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

from distdl.launchers.azureml.client import Connection, azure_errors, rest_client

# user_logs/std_log_process_00.txt of rank 0, ..01.txt of rank 1; std_log.txt of one process.
USER_LOG = re.compile(r"user_logs/std_log(?:_process_(\d+))?\.txt")


class RunHistory:
    """Azure ML's service that knows a job's status and where its log files are.

    Raises:
        UserError: From each method: Azure refuses, or is out of reach.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @functools.cached_property
    def _runs(self) -> str:
        """The address below which the workspace's runs are."""
        client, workspace = self._connection.client, self._connection.workspace
        discovery = client.workspaces.get(workspace.name).discovery_url
        service = self._get(self._files, discovery).json()["api"].rstrip("/")
        return f"{service}/history/v1.0{workspace.arm_id}/runs"

    @functools.cached_property
    def _service(self) -> Any:
        """For requests as whoever is signed in."""
        return rest_client(self._connection.credential, self._connection.scope)

    @functools.cached_property
    def _files(self) -> Any:
        """For addresses that carry their own signature."""
        return rest_client()

    @staticmethod
    def _get(client: Any, address: str, headers: dict[str, str] | None = None) -> Any:
        from azure.core.rest import HttpRequest

        response = client.send_request(HttpRequest("GET", address, headers=headers or {}))
        if response.status_code != 416:  # the file has no such range
            response.raise_for_status()
        return response

    def details(self, job: str) -> dict[str, Any]:
        """`status`, `logFiles` (name -> address), `error`, and more."""
        with azure_errors():
            return self._get(self._service, f"{self._runs}/{job}/details").json()

    def children(self, job: str) -> Iterator[dict[str, Any]]:
        """The trials of a sweep that have begun: `runId`, `status`, `tags`."""
        with azure_errors():
            address: str | None = f"{self._runs}/{job}/children"
        while address:
            with azure_errors():
                answer = self._get(self._service, address).json()
            yield from answer.get("value") or ()
            address = answer.get("nextLink")

    def read(self, address: str, start: int) -> bytes | None:
        """What a file has from a byte on; None if it is shorter than that by now."""
        with azure_errors():
            response = self._get(self._files, address, {"Range": f"bytes={start}-"})
        if response.status_code == 416:
            size = response.headers.get("Content-Range", "").rpartition("/")[2]
            return None if size.isdigit() and int(size) < start else b""
        content: bytes = response.read()
        # A server that does not know ranges sends everything.
        return content if response.status_code == 206 else content[start:]


class LogFile:
    """One growing file; `new` gives the lines that have been finished since the last time."""

    def __init__(self, history: RunHistory) -> None:
        self._history = history
        self._position, self._rest = 0, b""

    def new(self, address: str) -> list[str]:
        content = self._history.read(address, self._position)
        if content is None:  # Azure started the job again, and its log from the beginning
            self._position, self._rest = 0, b""
            content = self._history.read(address, 0) or b""
        self._position += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        return [line.decode(errors="replace").rstrip("\r") for line in lines]

    def rest(self) -> list[str]:
        """A last line that was never finished."""
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="replace")] if rest else []


def by_rank(files: dict[str, str]) -> dict[int, str]:
    """rank -> address of its output."""
    matches = ((USER_LOG.fullmatch(name), address) for name, address in files.items())
    return dict(sorted((int(match[1] or 0), address) for match, address in matches if match))
