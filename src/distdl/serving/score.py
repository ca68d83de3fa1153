"""Azure ML's online scoring script, which answers as `distdl serve` does. It goes into every model
folder. Azure calls `init` once, and `run` for each request.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from azureml_inference_server_http.api.aml_request import AMLRequest, rawhttp
from azureml_inference_server_http.api.aml_response import AMLResponse

scorer: Any = None


def init() -> None:
    """Loads the model of AZUREML_MODEL_DIR, or of the one folder in it."""
    global scorer
    root = Path(os.environ["AZUREML_MODEL_DIR"])
    folder = next(path.parent for depth in ("", "*/") for path in root.glob(f"{depth}model.json"))
    sys.path.insert(0, str(folder))
    from distdl.serving.scorer import Scorer

    scorer = Scorer(folder)


@rawhttp
def run(request: AMLRequest) -> AMLResponse:
    """Answers one request: 200 with `predictions`, or 4xx with one sentence under `error`."""
    from distdl.serving.requests import MOST_BYTES, RequestError, parse

    try:
        images, top_k = parse(request.stream.read(MOST_BYTES + 1), request.content_type)
        pixels = [_pixels(number, data) for number, data in enumerate(images)]
        return AMLResponse({"predictions": scorer.answers(pixels, top_k)}, 200, json_str=True)
    except RequestError as refused:
        return AMLResponse({"error": refused.sentence}, refused.status, json_str=True)


def _pixels(number: int, data: bytes) -> Any:
    from distdl.serving.requests import RequestError
    from distdl.serving.scorer import TooLarge

    try:
        return scorer.pixels(data)
    except ValueError as error:  # DamagedImage and TooLarge
        sentence = f"image {number}: {' '.join(str(error).split()):.200}"
        raise RequestError(413 if isinstance(error, TooLarge) else 400, sentence) from None
