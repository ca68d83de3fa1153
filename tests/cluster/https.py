"""An https server on loopback whose answers are exceptions: `raise Answer(404, {...})`."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
import urllib.parse
from pathlib import Path
from typing import Any


class Answer(Exception):
    """Ends the handling of a request: a status, a body, headers."""

    def __init__(self, status: int, body: Any = None, **headers: str) -> None:
        self.status, self.body, self.headers = status, body, headers


def error(status: int, code: str, message: str, **headers: str) -> Answer:
    """An error as Azure words it."""
    return Answer(status, {"error": {"code": code, "message": message}}, **headers)


def serve(service: Any, certificate: Path, key: Path) -> http.server.ThreadingHTTPServer:
    """Starts a server on a free port. `service.answer` raises the Answer, and `service.requests`
    gets the method, `service.short(path)` and body of each request."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet, else each answer waits 40 ms for an ACK

        def log_message(self, *_: Any) -> None:
            pass

        def handle_one(self) -> None:
            address = urllib.parse.urlsplit(self.path)
            path = urllib.parse.unquote(address.path)
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            service.requests.append((self.command, service.short(path), sent))
            try:
                body = json.loads(sent) if sent.strip() else None
                service.answer(self.command, path, body, self.headers, address.query)
            except Answer as answer:
                self.reply(answer)
            except Exception as failed:  # of the stand-in: seen in the SDK's message
                self.reply(error(500, "StandIn", repr(failed)))

        def reply(self, answer: Answer) -> None:
            raw = isinstance(answer.body, bytes)
            body = answer.body if raw else json.dumps(answer.body).encode()
            self.send_response(answer.status)
            length = {"Content-Type": "application/json", "Content-Length": str(len(body))}
            for name, value in {**length, **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()

        do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = handle_one

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
