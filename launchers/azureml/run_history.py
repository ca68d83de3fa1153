"""Reads a running job's log files with the same REST calls as the SDK's `jobs.stream`.

`jobs.stream` itself prints to stdout, downloads each file repeatedly, and is silent while a job is
queued (https://github.com/Azure/azure-cli/issues/27363).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from distdl.launchers.azureml.client import Connection, azure_errors, rest_client
from distdl.util.errors import Forgotten

if TYPE_CHECKING:
    from azure.core import PipelineClient
    from azure.core.rest import HttpRequest, HttpResponse

    Client = PipelineClient[HttpRequest, HttpResponse]

# user_logs/std_log_process_00.txt is rank 0's, ..01.txt rank 1's; a single process has std_log.txt.
USER_LOG = re.compile(r"user_logs/std_log(?:_process_(\d+))?\.txt")


class RunHistory:
    """Azure ML's service for a job's status and the addresses of its log files. Its methods raise a
    UserError if Azure rejects the request or cannot be reached."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @functools.cached_property
    def _runs(self) -> str:
        client, workspace = self._connection.client, self._connection.workspace
        discovery = client.workspaces.get(workspace.name).discovery_url
        service = self._get(self._files, discovery).json()["api"].rstrip("/")
        return f"{service}/history/v1.0{workspace.arm_id}/runs"

    @functools.cached_property
    def _service(self) -> Client:
        return rest_client(self._connection.credential, self._connection.scope)

    @functools.cached_property
    def _files(self) -> Client:
        """A client for addresses that contain their own signature."""
        return rest_client()

    @staticmethod
    def _get(client: Client, address: str, headers: dict[str, str] | None = None) -> HttpResponse:
        from azure.core.rest import HttpRequest

        response = client.send_request(HttpRequest("GET", address, headers=headers or {}))
        if response.status_code != 416:  # the requested range is beyond the end of the file
            response.raise_for_status()
        return response

    def details(self, job: str) -> dict[str, Any]:
        """`status`, `logFiles` (name -> address), `error`, and more. Forgotten if there is no such
        job."""
        with azure_errors():
            from azure.core.exceptions import ResourceNotFoundError

            runs = self._runs
            try:
                return self._get(self._service, f"{runs}/{job}/details").json()
            except ResourceNotFoundError as error:
                raise Forgotten.at(job, what="unknown to Azure ML") from error

    def children(self, job: str) -> Iterator[dict[str, Any]]:
        """The trials of a sweep that have started: `runId`, `status`, `tags`."""
        with azure_errors():
            address = f"{self._runs}/{job}/children"
        while address:
            with azure_errors():
                answer = self._get(self._service, address).json()
            yield from answer.get("value") or ()
            address = answer.get("nextLink") or ""

    def read(self, address: str, start: int) -> bytes | None:
        """A file's content from byte `start` on; None if the file is now shorter than that."""
        with azure_errors():
            response = self._get(self._files, address, {"Range": f"bytes={start}-"})
        if response.status_code == 416:
            size = response.headers.get("Content-Range", "").rpartition("/")[2]
            return None if size.isdigit() and int(size) < start else b""
        content: bytes = response.read()
        # A server without support for ranges sends the entire file.
        return content if response.status_code == 206 else content[start:]


class LogFile:
    """A growing file. `new` returns the lines that were completed since its last call."""

    def __init__(self, history: RunHistory) -> None:
        self._history = history
        self._position = 0
        self._rest = b""

    def new(self, address: str) -> list[str]:
        content = self._history.read(address, self._position)
        if content is None:  # Azure has restarted the job, and with it the log
            self._position = 0
            self._rest = b""
            content = self._history.read(address, 0) or b""
        self._position += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        return [line.decode(errors="replace").rstrip("\r") for line in lines]

    def rest(self) -> list[str]:
        """The last line, if it has no end of line."""
        rest = self._rest
        self._rest = b""
        return [rest.decode(errors="replace")] if rest else []


def by_rank(files: dict[str, str]) -> dict[int, str]:
    """Rank -> address of its output."""
    matches = ((USER_LOG.fullmatch(name), address) for name, address in files.items())
    return dict(sorted((int(match[1] or 0), address) for match, address in matches if match))
