"""Forms batches of images that arrive together. This file goes into every model folder."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from distdl.serving.requests import RequestError

log = logging.getLogger("distdl.serving")
DECODERS = min(8, os.cpu_count() or 1)  # threads


class ImageAnswer(Future[dict[str, Any]]):
    """The future answer for an image. If it is cancelled, the image is not scored."""

    def __init__(self, data: bytes, top_k: int) -> None:
        super().__init__()
        self.data: bytes | None = data
        self.pixels: Any = None
        self.top_k = top_k


class Batcher:
    """Decodes images in `DECODERS` threads and scores them in another one, in batches.

    A batch is scored when it is full, when it has as many images as were under way at the end of
    the last one (their clients probably send more), or when the model has waited `max_delay` for
    that. So a single client never waits.

    Args:
        scorer: A `Scorer`.
        max_batch: Images in a batch.
        max_delay: Seconds.
        max_queue: Images that may be under way.
    """

    def __init__(self, scorer: Any, max_batch: int, max_delay: float, max_queue: int) -> None:
        self.scorer = scorer
        self.max_batch, self.max_delay, self.max_queue = max_batch, max_delay, max_queue
        self.sizes: Counter[int] = Counter()  # of the batches
        self.queued = 0  # images without an answer
        self._expected = 0  # images under way when the last batch ended, itself included
        self._decoded: deque[ImageAnswer] = deque()
        self._changed = threading.Condition()
        self.pool = ThreadPoolExecutor(DECODERS, "decode", _set_threads, (1,))
        threading.Thread(target=self._score, daemon=True, name="score").start()

    def submit(self, images: Sequence[bytes], top_k: int) -> list[ImageAnswer]:
        """Raises RequestError if the queue has no room for all images."""
        if len(images) > self.max_queue:
            what = f"{len(images)} images, and the queue has room for {self.max_queue}"
            raise RequestError(413, what)
        with self._changed:
            if self.queued + len(images) > self.max_queue:
                raise RequestError(503, "the queue is full: try again later")
            self.queued += len(images)
        answers = [ImageAnswer(data, top_k) for data in images]
        for number, answer in enumerate(answers):
            answer.add_done_callback(self._leave)
            self.pool.submit(self._decode, answer, number)
        return answers

    def _leave(self, answer: Any) -> None:
        answer.data = answer.pixels = None
        with self._changed:
            self.queued -= 1

    def _decode(self, answer: ImageAnswer, number: int) -> None:
        data = answer.data
        if data is None:  # the client has given up
            return
        try:
            answer.pixels = self.scorer.pixels(data)
        except Exception as error:
            status = 413 if type(error).__name__ == "TooLarge" else 400
            what = f"image {number}: {' '.join(str(error).split()):.200}"
            _settle(answer, RequestError(status, what))
        else:
            with self._changed:
                self._decoded.append(answer)
                self._changed.notify()

    def _score(self) -> None:
        _set_threads()
        while True:
            # Pixels are dropped when a client gives up, also between these lines.
            pairs = [(answer, answer.pixels) for answer in self._next()]
            pairs = [(answer, pixels) for answer, pixels in pairs if pixels is not None]
            if not pairs:
                continue
            batch, pixels = zip(*pairs, strict=True)
            self.sizes[len(batch)] += 1
            try:
                results = self.scorer.answers(pixels, max(answer.top_k for answer in batch))
            except Exception:
                log.exception("the model failed on %d images", len(batch))
                failure = RequestError(500, "the model failed: the server's log says why")
                results = [failure] * len(batch)
            self._expected = self.queued
            for answer, result in zip(batch, results, strict=True):
                _settle(answer, result)

    def _next(self) -> list[ImageAnswer]:
        with self._changed:
            self._changed.wait_for(lambda: self._decoded)
            end = time.monotonic() + self.max_delay
            while len(self._decoded) < min(self.max_batch, max(self._expected, self.queued)):
                if not self._changed.wait(end - time.monotonic()):
                    break
            count = min(self.max_batch, len(self._decoded))
            return [self._decoded.popleft() for _ in range(count)]


def _settle(answer: ImageAnswer, result: Any) -> None:
    with suppress(InvalidStateError):  # the client has given up
        if isinstance(result, RequestError):
            answer.set_exception(result)
        else:
            answer.set_result(result)


def _set_threads(count: int = 0) -> None:
    """Sets how many threads torch uses in this one; 0: half of what it would. The other cores
    decode and answer. OpenMP's threads spin while they wait for a core that these take."""
    import torch

    torch.set_num_threads(count or max(1, torch.get_num_threads() // 2))
