"""An https server on loopback whose answers are exceptions: `raise Answer(404, {...})`."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
import urllib.parse
from pathlib import Path
from typing import Any, Protocol


class Service(Protocol):
    """What answers. `requests` gets method, short path and body of each request."""

    requests: list[tuple[str, str, str]]

    def short(self, path: str) -> str: ...

    def answer(self, method: str, path: str, body: Any, header: Any, query: str) -> None: ...


class Answer(Exception):
    """Ends the handling of a request: a status, a body, headers."""

    def __init__(self, status: int, body: Any = None, **headers: str) -> None:
        self.status, self.body, self.headers = status, body, headers


def serve(service: Service, certificate: Path, key: Path) -> http.server.ThreadingHTTPServer:
    """Starts it on a free port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler_of(service))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def handler_of(service: Service) -> type[http.server.BaseHTTPRequestHandler]:
    """A handler that lets `service.answer` answer, and notes each request in `service.requests`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet, else each answer waits 40 ms for an ACK

        def log_message(self, *_: Any) -> None:
            pass

        def handle_one(self) -> None:
            address = urllib.parse.urlsplit(self.path)
            path = urllib.parse.unquote(address.path)
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            service.requests.append((self.command, service.short(path), sent.decode()))
            body = json.loads(sent) if sent.strip() else None
            try:
                service.answer(self.command, path, body, self.headers, address.query)
            except Answer as answer:
                self.reply(answer)
            except Exception as failed:  # of this file: seen in the SDK's message
                self.reply(Answer(500, {"error": {"code": "StandIn", "message": repr(failed)}}))

        def reply(self, answer: Answer) -> None:
            body = (
                answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            )
            self.send_response(answer.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()

        do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = handle_one

    return Handler
