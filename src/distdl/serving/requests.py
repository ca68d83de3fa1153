"""Reads the images out of the body of an HTTP request. This file goes into every model folder."""

from __future__ import annotations

import base64
import json
from typing import Any, NamedTuple

MOST_BYTES = 32 * 2**20  # of a body
MOST_IMAGES = 64  # of a request
MOST_PARTS = 1000  # commas and opening brackets in JSON
JSON_FORM = '{"images": ["<base64>", ...], "top_k": 5}'


class RequestError(Exception):
    """A request that cannot be answered: the HTTP status, and one sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


class ImageRequest(NamedTuple):
    """Encoded images, and how many classes the answer for each should have."""

    images: list[bytes]
    top_k: int


def parse(body: bytes, content_type: str | None) -> ImageRequest:
    """Reads a body: the bytes of one image, or JSON with images in base64.

    JSON has `images`, or one of the forms that MLflow and SageMaker send: `instances`, `inputs`,
    `dataframe_records`, `dataframe_split`; an entry is a text, or an object with `image` or `b64`.

    Raises:
        RequestError: 400, 413 or 415.
    """
    kind = (content_type or "").partition(";")[0].strip().lower()
    if len(body) > MOST_BYTES:
        raise RequestError(413, f"the body is larger than {MOST_BYTES >> 20} MiB")
    if not body:
        raise RequestError(
            400, f"the body is empty: send the bytes of an image, or JSON: {JSON_FORM}"
        )
    if kind.startswith("image/") or kind in ("application/octet-stream", "application/x-image"):
        return ImageRequest([body], 5)
    if kind != "application/json":
        what = f"the content type is {kind[:60] or 'missing'}"
        raise RequestError(
            415,
            f"{what}: use image/jpeg, application/octet-stream or application/json "
            "(curl -H 'Content-Type: image/jpeg')",
        )
    if sum(map(body.count, (b",", b"[", b"{"))) > MOST_PARTS:  # each would take 60 bytes of memory
        raise RequestError(400, f"the JSON has too many parts: {JSON_FORM}")
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(400, f"the body is not JSON: {JSON_FORM}") from None
    top_k = message.get("top_k", 5) if isinstance(message, dict) else None
    entries = _entries(message)
    if not isinstance(entries, list) or not entries:
        raise RequestError(400, f"there are no images in the JSON: {JSON_FORM}")
    if len(entries) > MOST_IMAGES:
        raise RequestError(413, f"{len(entries)} images, and a request may have {MOST_IMAGES}")
    unknown = {*message} - {"images", "top_k"} if "images" in message else ()
    if unknown:
        raise RequestError(400, f"{min(unknown):.60} is not a part of the JSON: {JSON_FORM}")
    if type(top_k) is not int or top_k < 1:
        raise RequestError(400, "top_k is not a whole number of at least 1")
    return ImageRequest([_decoded(entry, number) for number, entry in enumerate(entries)], top_k)


def _entries(message: Any) -> Any:
    if not isinstance(message, dict):
        return None
    for name in ("images", "instances", "inputs", "dataframe_records"):
        if name in message:
            entries = message[name]
            return entries.get("image") if isinstance(entries, dict) else entries
    split = message.get("dataframe_split")
    return split.get("data") if isinstance(split, dict) else None


def _decoded(entry: Any, number: int) -> bytes:
    text = entry.get("image", entry.get("b64")) if isinstance(entry, dict) else entry
    if isinstance(text, list) and len(text) == 1:
        (text,) = text
    try:
        if not isinstance(text, str):
            raise ValueError
        return base64.b64decode(text.partition(";base64,")[2] or text, validate=True)
    except ValueError:
        raise RequestError(400, f"image {number} is not base64") from None
