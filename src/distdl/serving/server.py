"""Answers over HTTP by a model folder. This file goes into every model folder.

python -m distdl_scoring.server MODEL [serve.key=value ...]
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from distdl.serving.batching import Batcher
from distdl.serving.requests import MOST_BYTES, RequestError, parse
from distdl.serving.settings import Settings, WrongSettings, settings_of

MOST_IN_FLIGHT = 4 * MOST_BYTES  # bytes of all bodies together
MOST_CONNECTIONS = 900  # below the usual limit of open files, 1024
WINDOW = 1000  # answered requests whose latencies `/health` describes
HEADERS_S = 10.0  # for a request's headers
LINGER_S = 5.0  # for the rest of a body that is too large
LONG_JSON = 1 << 16  # bytes of a body that takes a while to read
KEEP_ALIVE_S = 75  # longer than the 60 s of usual load balancers


class Service:
    """The endpoints, and what they count.

    Args:
        load: Returns the `Scorer`; called in a thread while `/health` answers already.
        settings: Of the server.
    """

    def __init__(self, load: Callable[[], Any], settings: Settings) -> None:
        self.load, self.settings = load, settings
        self.scorer: Future[Any] = Future()  # when it is loaded and warm
        self.batcher: Batcher | None = None
        self.answered = self.refused = self.bytes = 0
        self.seconds: deque[float] = deque(maxlen=WINDOW)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        threading.Thread(target=self._start, daemon=True).start()
        yield
        if self.batcher:
            self.batcher.pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        try:
            import torch

            scorer, each = self.load(), self.settings
            image = torch.zeros(3, scorer.image_size, scorer.image_size, dtype=torch.uint8)
            for count in (1, each.max_batch):
                scorer.answers([image] * count)
            delay = each.max_delay_ms / 1000
            self.batcher = Batcher(scorer, each.max_batch, delay, each.max_queue)
            self.scorer.set_result(scorer)
        except BaseException as error:
            self.scorer.set_exception(error)

    async def ready(self) -> Response:
        """200 when the model answers."""
        return _json({"ready": bool(self.batcher)}, 200 if self.batcher else 503)

    async def health(self) -> Response:
        """200 while the process lives, with counts and latencies."""
        return _json({"status": "ready" if self.batcher else "loading", **self.counts()})

    def counts(self) -> dict[str, Any]:
        seconds, batcher = sorted(self.seconds), self.batcher
        latency = {
            f"p{p}": round(1000 * seconds[(len(seconds) * p - 1) // 100], 3) if seconds else None
            for p in (50, 95, 99)
        }
        return {
            "requests": self.answered,
            "rejected": self.refused,
            "queue": batcher.queued if batcher else 0,
            "batches": dict(batcher.sizes) if batcher else {},
            "latency_ms": latency,
        }

    async def score(self, request: Request) -> Response:
        """The classes of the images in the body."""
        started, limit = time.perf_counter(), self.settings.timeout_s
        body, complete = bytearray(), False
        try:
            async with asyncio.timeout(limit):
                batcher = self._admit(request)
                await self._read(request, body)
                complete = True
                answers = await self._answers(batcher, request, bytes(body))
                self.answered += 1
                self.seconds.append(time.perf_counter() - started)
                return _json({"predictions": answers})
        except RequestError as error:
            status, sentence = error.status, error.sentence
        except TimeoutError:
            what = "no answer" if complete else "no complete body"
            status, sentence = 504 if complete else 408, f"{what} within {limit:g} s"
        except ClientDisconnect:
            status, sentence = 400, "the client has disconnected"
        except asyncio.CancelledError:  # by uvicorn, when `drain_s` is over
            status, sentence = 503, "the server ends: try again later"
        finally:
            self.bytes -= len(body)
        self.refused += 1
        if status == 413 and not complete:
            # Many clients send all before they read, and would only see a reset connection.
            with suppress(TimeoutError, ClientDisconnect):
                async with asyncio.timeout(LINGER_S):
                    async for _ in request.stream():
                        pass
        return _error(status, sentence)

    def _admit(self, request: Request) -> Batcher:
        if self.settings.token:
            sent = request.headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(sent, f"Bearer {self.settings.token}".encode()):
                raise RequestError(
                    401, "the token is missing or wrong: Authorization: Bearer TOKEN"
                )
        if int(request.headers.get("content-length", 0)) > MOST_BYTES:
            raise RequestError(413, f"the body is larger than {MOST_BYTES >> 20} MiB")
        if self.batcher is None:
            raise RequestError(503, "the model is being loaded: try again later")
        return self.batcher

    async def _read(self, request: Request, body: bytearray) -> None:
        async for chunk in request.stream():
            body += chunk
            self.bytes += len(chunk)
            if len(body) > MOST_BYTES:
                raise RequestError(413, f"the body is larger than {MOST_BYTES >> 20} MiB")
            if self.bytes > MOST_IN_FLIGHT:
                raise RequestError(503, "too many large bodies arrive at once: try again later")

    async def _answers(
        self, batcher: Batcher, request: Request, body: bytes
    ) -> list[dict[str, Any]]:
        kind = request.headers.get("content-type")
        if len(body) < LONG_JSON or not (kind or "").startswith("application/json"):
            images, top_k = parse(body, kind)
        else:
            loop = asyncio.get_running_loop()
            images, top_k = await loop.run_in_executor(batcher.pool, parse, body, kind)
        futures = batcher.submit(images, top_k)
        answers = asyncio.gather(*map(asyncio.wrap_future, futures))
        gone = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait((answers, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answers.done():
                raise ClientDisconnect
            return [{**each, "top": each["top"][:top_k]} for each in answers.result()]
        finally:
            gone.cancel()
            answers.cancel()
            for future in futures:
                future.cancel()


def create_app(load: Callable[[], Any], settings: Settings) -> FastAPI:
    """The application. Its `state.service` is a `Service` with these arguments."""
    service = Service(load, settings)
    app = FastAPI(lifespan=service.lifespan, openapi_url=None)
    app.state.service = service
    for path in ("/score", "/invocations"):
        app.post(path)(service.score)
    for path in ("/ping", "/ready"):
        app.get(path)(service.ready)
    app.get("/health")(service.health)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        paths = "POST /score and /invocations, GET /ping, /ready and /health"
        return _error(error.status_code, f"{error.detail}: there are {paths}")

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return _error(500, "the server failed: see its log")

    return app


def _json(value: Any, status: int = 200, headers: Any = None) -> Response:
    body = json.dumps(value, allow_nan=False).encode()
    return Response(body, status, headers, "application/json")


def _error(status: int, sentence: str) -> Response:
    headers = {503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(status)
    return _json({"error": sentence}, status, headers)


class HttpConnection(H11Protocol):
    """uvicorn's, which also ends a client that takes longer than `HEADERS_S` to send headers, or to
    send the rest of a body that was refused."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        refused = self.cycle is not None and self.cycle.response_complete
        state = self.conn.their_state
        if state is h11.IDLE or (refused and state is h11.SEND_BODY):
            self._late = self._late or self.loop.call_later(HEADERS_S, self.transport.abort)
        elif self._late:
            self._late.cancel()
            self._late = None


def run(
    load: Callable[[], Any], settings: Settings, on_ready: Callable[[str, Any], None]
) -> dict[str, Any]:
    """Serves until SIGTERM or SIGINT, and returns the counts of `/health`.

    Args:
        load, settings: Of `Service`.
        on_ready: Called with the URL and the scorer when the model is loaded and warm.

    Raises:
        WrongSettings: The port cannot be opened.
        Exception: What `load` raised.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        what = f"{settings.host} port {settings.port} cannot be opened: {reason}; choose another"
        raise WrongSettings([("serve.port", what)]) from None
    # Connections inherit it. asyncio sets it only for sockets that name their protocol, and without
    # it an answer waits 40 ms for the acknowledgement of its headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    app = create_app(load, settings)
    config = uvicorn.Config(
        app,
        http=HttpConnection,
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=settings.drain_s,
    )
    server, service = uvicorn.Server(config), app.state.service

    def stop(*_: Any) -> None:
        server.should_exit = True

    def loaded(scorer: Future[Any]) -> None:
        if scorer.exception():
            stop()
        else:
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            on_ready(f"http://{host}:{listener.getsockname()[1]}", scorer.result())

    service.scorer.add_done_callback(loaded)
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again when it has ended
        signal.signal(number, stop)
    server.run(sockets=[listener])
    if service.scorer.done():
        service.scorer.result()
    return service.counts()


def main(argv: Sequence[str]) -> int:
    """`MODEL [serve.key=value ...]`; returns the exit code."""
    if not argv:
        print(__doc__, file=sys.stderr)
        return 2

    def load() -> Any:  # imports torch, while the port is open already
        from distdl.serving.scorer import Scorer

        return Scorer(argv[0])

    try:
        settings = settings_of(argv[1:])
        run(load, settings, lambda url, scorer: print(f"ready: {url}", flush=True))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a model may still be loading
