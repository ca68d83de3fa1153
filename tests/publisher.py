"""A server on loopback that publishes weights as Hugging Face and torchvision do, or badly."""

from __future__ import annotations

import hashlib
import http.server
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

COMMIT = "c0ffee" + 34 * "0"


def pickled(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


class Publisher:
    """Serves `files` by path.

    Args:
        hub: Whether it answers as Hugging Face does: with a commit, and a hash as `ETag`.
        elsewhere: Of another server, to which a hub sends those who want the bytes.
        cut: Bytes that are missing at the end of each answer.
        stated: The hash that a hub states in place of the right one.
        status: Of each answer.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.files: dict[str, bytes] = {}
        self.hub = False
        self.elsewhere: Publisher | None = None
        self.cut = 0
        self.stated = ""
        self.status = 200
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, authorization


@contextmanager
def publishing() -> Iterator[Publisher]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            publisher.requests.append((self.command, path, self.headers["Authorization"]))
            data = publisher.files.get(path)
            if data is None or publisher.status != 200:
                self.send_response(404 if data is None else publisher.status)
                if data is None and publisher.hub:
                    self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            away = publisher.elsewhere
            self.send_response(302 if away else 200)
            if publisher.hub:
                digest = publisher.stated or hashlib.sha256(data).hexdigest()
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("X-Linked-Etag", f'"{digest}"')
                self.send_header("X-Linked-Size", str(len(data)))
                self.send_header("ETag", f'"{digest}"')
            if away:
                self.send_header("Location", f"{away.url}/signed{path}?signature=x")
            self.send_header("Content-Length", "0" if away else str(len(data)))
            self.end_headers()
            if body and not away:
                self.wfile.write(data[: len(data) - publisher.cut])

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        publisher = Publisher(f"http://127.0.0.1:{server.server_address[1]}")
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield publisher
        server.shutdown()
