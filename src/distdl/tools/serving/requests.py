"""Reads the images out of the body of an HTTP request. This file goes into every model folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import Base64Bytes, BaseModel, BeforeValidator, Field, ValidationError
from pydantic.aliases import AliasChoices, AliasPath
from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from distdl.tools.serving.scorer import Scorer

Result = TypeVar("Result")
MOST_BYTES = 32 * 2**20  # of a body
MOST_IMAGES = 64  # of a request
MOST_PARTS = 1000  # commas and opening brackets in JSON
JSON_FORM = '{"images": ["<base64>", ...], "top_k": 5}'


def _text(entry: object) -> object:
    """The text of an image, which may be under `image` or `b64`, or the only cell of a row."""
    if isinstance(entry, dict):
        entry = entry.get("image", entry.get("b64"))
    return entry[0] if isinstance(entry, list) and len(entry) == 1 else entry


class ImagesAsJson(BaseModel, extra="forbid"):
    """`JSON_FORM`, or one of the forms that MLflow and SageMaker send."""

    images: list[Annotated[Base64Bytes, BeforeValidator(_text)]] = Field(
        min_length=1,
        max_length=MOST_IMAGES,
        validation_alias=AliasChoices(
            "images",
            "instances",
            AliasPath("inputs", "image"),
            "inputs",
            "dataframe_records",
            AliasPath("dataframe_split", "data"),
        ),
    )
    top_k: int | None = Field(
        None, ge=1, validation_alias=AliasChoices("top_k", AliasPath("params", "top_k"))
    )


def parse(body: bytes, content_type: str | None) -> tuple[list[bytes], int | None]:
    """Reads a body: the bytes of one image, or `ImagesAsJson`.

    Returns:
        Encoded images, and how many classes or objects the answer for each should have at most;
        None: nothing is said.

    Raises:
        HTTPException: 400, 413 or 415.
    """
    kind = (content_type or "missing").partition(";")[0].strip().lower()
    if len(body) > MOST_BYTES:
        raise HTTPException(413, f"the body is larger than {MOST_BYTES >> 20} MiB")
    if not body:
        raise HTTPException(400, f"the body is empty: send an image, or JSON: {JSON_FORM}")
    if kind.startswith("image/") or kind in ("application/octet-stream", "application/x-image"):
        return [body], None
    if kind != "application/json":
        what = f"the content type is {kind:.60}"
        raise HTTPException(415, f"{what}: use image/jpeg or application/json")
    if sum(map(body.count, (b",", b"[", b"{"))) > MOST_PARTS:  # each would take 60 bytes of memory
        raise HTTPException(400, f"the JSON has too many parts: {JSON_FORM}")
    try:
        message = ImagesAsJson.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ascii(".".join(map(str, problem["loc"])) or "body")
        status = 413 if problem["type"] == "too_long" else 400
        what = f"the JSON is not {JSON_FORM}: {where:.60}: {problem['msg']}"
        raise HTTPException(status, what) from None
    return message.images, message.top_k


def opened(
    scorer: Scorer, body: bytes, content_type: str | None
) -> tuple[list[bytes], list[int], int | None]:
    """As `parse`, and in between how much work each image is to decode, by its header: in pixels.

    Raises:
        HTTPException: 400, 413 or 415.
    """
    images, top_k = parse(body, content_type)
    works = [_tried(scorer.examine, number, data).work for number, data in enumerate(images)]
    return images, works, top_k


def decoded(scorer: Scorer, number: int, data: bytes) -> object:
    """An image of a request as `Scorer.pixels` gives it.

    Raises:
        HTTPException: 400 or 413.
    """
    return _tried(scorer.pixels, number, data)


def _tried(action: Callable[[bytes], Result], number: int, data: bytes) -> Result:
    try:
        return action(data)
    except Exception as error:  # decoders raise many kinds; one client hears of it
        what = f"image {number}: {' '.join(str(error).split()):.200}"
        raise HTTPException(getattr(error, "status_code", 400), what) from None
