"""Forms batches of images that arrive together. This file goes into every model folder."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from distdl.tools.serving.requests import decoded, opened
from distdl.tools.serving.settings import Settings
from distdl.tools.serving.threads import Threads

if TYPE_CHECKING:
    from distdl.tools.serving.scorer import Scorer

log = logging.getLogger("distdl.tools.serving")
DECODERS = max(2, min(8, os.cpu_count() or 1))  # threads
# Pixels, in all passes of the decoder. An image with more takes some 40 ms or longer.
LARGE = 4_000_000


class Batcher:
    """Decodes images in `DECODERS` threads and scores them in another one, in batches. Large images
    have threads of their own, one less, so that no number of them holds up an ordinary photograph.

    A batch is scored when it is full, when it has as many images as were under way at the end of
    the last one (their clients probably send more), or when the model has waited `max_delay_ms`
    for that. So a single client never waits.

    While `max_queue` images are under way, no further request is accepted.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.most = settings.max_batch  # images that the model scores at once
        self.scorer: Any = None  # a `Scorer`, when it is loaded and warm
        self.sizes: Counter[int] = Counter()  # of the batches
        self.queued = 0  # images without an answer
        self._expected = 0  # images under way when the last batch ended, itself included
        # The pixels of images that wait for the model, by the future results.
        self._waiting: dict[asyncio.Future[Any], Any] = {}
        self._changed = asyncio.Condition()
        one = partial(_set_threads, 1)
        self._decoding = Threads(DECODERS, "decode", one)
        self._decoding_large = Threads(DECODERS - 1, "decode-large", one)
        self._scoring = Threads(1, "score", _set_threads)

    @property
    def stuck(self) -> bool:
        """Whether no image can be answered, since all threads of one kind have been busy with the
        same work for longer than a request may take."""
        limit = self.settings.timeout_s
        return self._decoding.stuck(limit) or self._scoring.stuck(limit)

    def finish(self, seconds: float) -> None:
        """Waits until no thread has work, for so long at most: torch must not be cut off."""
        end = time.monotonic() + seconds
        pools = (self._decoding, self._decoding_large, self._scoring)
        while time.monotonic() < end and not self.stuck and not all(p.idle() for p in pools):
            time.sleep(0.05)

    async def answers(self, body: bytes, content_type: str | None) -> list[Any]:
        """The answers for the images of a request. If it is cancelled, they are not scored.

        Raises:
            HTTPException: The body is wrong, the queue is full, or the model failed.
        """
        loop = asyncio.get_running_loop()
        task = loop.run_in_executor(self._decoding, opened, self.scorer, body, content_type)
        images, works, top_k = await task
        if self.queued >= self.settings.max_queue:
            raise HTTPException(503, "the queue is full: try again later")
        self.queued += len(images)
        try:
            # All of them end before the queue has room again: their memory stays bounded.
            each = (
                self._answer(number, data, work, top_k)
                for number, (data, work) in enumerate(zip(images, works, strict=True))
            )
            results = await asyncio.gather(*each, return_exceptions=True)
        finally:
            self.queued -= len(images)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def _answer(
        self, number: int, data: bytes, work: int, top_k: int | None
    ) -> dict[str, Any]:
        threads = self._decoding_large if work > LARGE else self._decoding
        loop = asyncio.get_running_loop()
        pixels = await loop.run_in_executor(threads, decoded, self.scorer, number, data)
        future: asyncio.Future[Any] = asyncio.Future()
        try:
            async with self._changed:
                self._waiting[future] = pixels
                self._changed.notify()
            found = await future
        finally:
            self._waiting.pop(future, None)
        if found is None:
            raise HTTPException(500, "the model failed: the server's log says why")
        return self.scorer.answer(found, top_k)

    async def run(self, load: Callable[[], Scorer], on_ready: Callable[[Scorer], None]) -> None:
        """Loads a model, calls `on_ready(scorer)`, and scores until cancelled."""
        loop = asyncio.get_running_loop()
        warm = partial(_warm, load, self.settings.max_batch)
        self.scorer = await loop.run_in_executor(self._scoring, warm)
        self.most = _most(self.scorer, self.settings.max_batch)
        on_ready(self.scorer)
        score = self.scorer.found
        while True:
            if not (batch := await self._next()):  # all have given up
                continue
            self.sizes[len(batch)] += 1
            try:
                rows = await loop.run_in_executor(self._scoring, score, [*batch.values()])
            except Exception:  # the model may raise anything; the server answers on
                log.exception("the model failed on %d images", len(batch))
                rows = [None] * len(batch)
            self._expected = self.queued
            for future, row in zip(batch, rows, strict=True):
                if not future.done():  # its client has not given up
                    future.set_result(row)

    async def _next(self) -> dict[asyncio.Future[Any], Any]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._waiting)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settings.max_delay_ms / 1000):
                    await self._changed.wait_for(self._enough)
        futures = list(self._waiting)[: self.most]
        return {future: self._waiting.pop(future) for future in futures}

    def _enough(self) -> bool:
        expected = max(self._expected, self.queued)
        return len(self._waiting) >= min(self.most, expected)


def _warm(load: Callable[[], Scorer], max_batch: int) -> Scorer:
    scorer = load()
    for count in sorted({1, _most(scorer, max_batch)}):
        scorer.found([scorer.kind.example()] * count)
    return scorer


def _most(scorer: Scorer, max_batch: int) -> int:
    """One, if the domain's networks get one image at a time: then none waits for the others."""
    return max_batch if scorer.kind.together else 1


def _set_threads(count: int = 0) -> None:
    """Sets how many threads torch uses in this one; 0: half of what it would. The other cores
    decode and answer. OpenMP's threads spin while they wait for a core that these take."""
    import torch

    torch.set_num_threads(count or max(1, torch.get_num_threads() // 2))
