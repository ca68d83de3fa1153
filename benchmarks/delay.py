"""An HTTP proxy that delays every request to the server behind it.

    python -m benchmarks.delay http://127.0.0.1:5000 0.7    # prints its own address

`GET /delayed` returns the number of requests so far, without a delay. The proxy uses only the
standard library, so that it starts at once. It is a separate process, so that it does not share an
interpreter with the measured training.
"""

from __future__ import annotations

import http.client
import sys
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COUNT = "/delayed"
OWN = ("transfer-encoding", "connection", "content-length", "date", "server")


class Delay(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open, as with the server itself
    target = ""
    seconds = 0.0
    requests = 0

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == COUNT:
            self.answer(200, [], str(Delay.requests).encode())
            return
        Delay.requests += 1
        time.sleep(self.seconds)
        behind = http.client.HTTPConnection(self.target, timeout=60)
        try:
            behind.request(self.command, self.path, body, dict(self.headers))
            response = behind.getresponse()
            self.answer(response.status, response.getheaders(), response.read())
        finally:
            behind.close()

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = forward

    def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in OWN:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main(target: str, seconds: str) -> None:
    Delay.target = urllib.parse.urlsplit(target).netloc
    Delay.seconds = float(seconds)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Delay)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
