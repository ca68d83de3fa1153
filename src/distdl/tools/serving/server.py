"""Answers over HTTP by a model folder. This file goes into every model folder.

python -m distdl_scoring.server MODEL [serve.key=value ...]
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import signal
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from distdl.tools.serving.batching import Batcher
from distdl.tools.serving.requests import MOST_BYTES
from distdl.tools.serving.settings import Settings, values_of

if TYPE_CHECKING:
    from distdl.tools.serving.scorer import Scorer

MOST_IN_FLIGHT = 4 * MOST_BYTES  # bytes of all bodies together
MOST_CONNECTIONS = 900  # below the usual limit of open files, 1024
WINDOW = 1000  # answered requests whose latencies `/health` describes
KEEP_ALIVE_S = 75  # longer than the 60 s of usual load balancers
PATHS = "there are POST /score and /invocations, GET /ping, /ready and /health"


class Service:
    """The endpoints, and what they count.

    Args:
        load: Loads the model, while `/health` answers already.
        settings: Of the server.
        on_ready: Called with the `Scorer` when it is loaded and warm.
    """

    def __init__(
        self, load: Callable[[], Scorer], settings: Settings, on_ready: Callable[[Scorer], None]
    ) -> None:
        self.load = load
        self.settings = settings
        self.on_ready = on_ready
        self.batcher = Batcher(settings)
        self.answered = self.refused = self.bytes = 0
        self.seconds: deque[float] = deque(maxlen=WINDOW)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.scoring = asyncio.create_task(self.batcher.run(self.load, self.on_ready))
        # If the model cannot be loaded, the server ends.
        self.scoring.add_done_callback(_end_unless_cancelled)
        yield
        self.scoring.cancel()

    async def ready(self, request: Request) -> Response:
        """200 when the model answers: not while it is loaded, nor while its threads are stuck."""
        ready = self.batcher.scorer is not None and not self.batcher.stuck
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def health(self, request: Request) -> Response:
        """200 while the process lives, with counts and latencies."""
        return JSONResponse(self.counts())

    @property
    def status(self) -> str:
        if self.batcher.scorer is None:
            return "loading"
        return "stuck" if self.batcher.stuck else "ready"

    def counts(self) -> dict[str, Any]:
        latencies = np.percentile(self.seconds or [0.0], (50, 95, 99)).round(6) * 1000
        return {
            "status": self.status,
            "requests": self.answered,
            "rejected": self.refused,
            "queue": self.batcher.queued,
            "batches": self.batcher.sizes,
            "latency_ms": dict(zip(("p50", "p95", "p99"), latencies.tolist(), strict=True)),
        }

    async def score(self, request: Request) -> Response:
        """The answers for the images in the body."""
        started = time.perf_counter()
        limit = self.settings.timeout_s
        body = bytearray()
        late = HTTPException(408, f"no complete body within {limit:g} s")
        try:
            async with asyncio.timeout(limit):
                self._admit(request)
                async for chunk in request.stream():
                    if len(body) > MOST_BYTES:  # many clients send all before they read
                        continue
                    body += chunk
                    self.bytes += len(chunk)
                    if self.bytes > MOST_IN_FLIGHT:
                        raise HTTPException(503, "too many large bodies at once: try again later")
                late = HTTPException(504, f"no answer within {limit:g} s")
                kind = request.headers.get("content-type")
                answers = await self.batcher.answers(bytes(body), kind)
        except TimeoutError:
            raise late from None
        except (asyncio.CancelledError, ClientDisconnect):  # a second Ctrl-C, or nobody reads it
            raise HTTPException(503, "the server ends: try again later") from None
        finally:
            self.bytes -= len(body)
        self.answered += 1
        self.seconds.append(time.perf_counter() - started)
        return JSONResponse({"predictions": answers})

    def _admit(self, request: Request) -> None:
        if self.settings.token:
            sent = request.headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(sent, f"Bearer {self.settings.token}".encode()):
                what = "the token is missing or wrong: Authorization: Bearer TOKEN"
                raise HTTPException(401, what)
        if self.batcher.scorer is None:
            raise HTTPException(503, "the model is being loaded: try again later")

    async def refuse(self, request: Request, error: Exception) -> Response:
        """The answer to a request that this file or Starlette has refused."""
        assert isinstance(error, HTTPException)  # for which alone it is registered
        self.refused += 1
        what = f"{error.detail}: {PATHS}" if error.status_code in (404, 405) else error.detail
        headers = {503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}
        return JSONResponse({"error": what}, error.status_code, headers.get(error.status_code))


def _end_unless_cancelled(scoring: asyncio.Task[None]) -> None:
    if not scoring.cancelled():
        signal.raise_signal(signal.SIGTERM)


class Server(uvicorn.Server):
    """Ends at once on a second signal, also on SIGTERM: uvicorn does so on SIGINT only."""

    over = hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and not self.over:
            self.hurried = self.force_exit = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self.over = True  # uvicorn now raises the signals again that have ended it


def run(
    load: Callable[[], Scorer], settings: Settings, on_ready: Callable[[str, Scorer], None]
) -> dict[str, Any]:
    """Serves until SIGTERM or SIGINT, and returns what `/health` does.

    Args:
        load, settings: Of `Service`.
        on_ready: Called with the URL and the scorer when the model is loaded and warm.

    Raises:
        ValueError: The port cannot be opened, or the model cannot be loaded.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"serve.port: cannot be opened: {error.strerror}") from None
    # Connections inherit it. asyncio sets it only for sockets that name their protocol, and without
    # it an answer waits 40 ms for the acknowledgement of its headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{listener.getsockname()[1]}"
    service = Service(load, settings, lambda scorer: on_ready(url, scorer))
    app = FastAPI(
        routes=[
            *(Route(path, service.score, methods=["POST"]) for path in ("/score", "/invocations")),
            *(Route(path, service.ready) for path in ("/ping", "/ready")),
            Route("/health", service.health),
        ],
        lifespan=service.lifespan,
        exception_handlers={HTTPException: service.refuse},
        openapi_url=None,
    )
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        access_log=False,
        log_level="warning",
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = Server(config)
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again when it has ended
        signal.signal(number, server.handle_exit)
    server.run(sockets=[listener])
    if not server.hurried:
        for number in (signal.SIGINT, signal.SIGTERM):  # from now on one ends the process at once
            signal.signal(number, signal.SIG_DFL)
        service.batcher.finish(settings.timeout_s)
    if not service.scoring.cancelled():
        service.scoring.result()
    return service.counts()


def main() -> None:
    """Serves a model folder where distdl is not installed."""
    parser = argparse.ArgumentParser("python -m distdl_scoring.server")
    parser.add_argument("model", help="the folder")
    parser.add_argument("settings", nargs="*", help="serve.key=value")
    options = parser.parse_args()

    def load() -> Scorer:
        from distdl.tools.serving.scorer import Scorer

        # Whoever starts this file runs code of the folder already.
        return Scorer(options.model, trust=True)

    try:
        settings = Settings.model_validate(values_of(options.settings))
        run(load, settings, lambda url, scorer: print(f"ready: {url}", flush=True))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
