"""Azure ML's online scoring script: the code of `distdl serve` behind Microsoft's server. It goes
into every model folder. Azure calls `init` once, and `run` for each request.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from azureml_inference_server_http.api.aml_request import AMLRequest, rawhttp
from azureml_inference_server_http.api.aml_response import AMLResponse

batcher: Any = None


def init() -> None:
    """Loads the model of AZUREML_MODEL_DIR, or of a folder in it."""
    global batcher
    folder = next(Path(os.environ["AZUREML_MODEL_DIR"]).rglob("model.json")).parent
    sys.path.insert(0, str(folder))
    from distdl.serving.batching import Batcher
    from distdl.serving.requests import MOST_IMAGES
    from distdl.serving.scorer import Scorer

    batcher = Batcher(Scorer(folder), max_batch=32, max_delay=0.0, max_queue=MOST_IMAGES)


@rawhttp
def run(request: AMLRequest) -> AMLResponse:
    """Answers one request: 200 with `predictions`, or 4xx with one sentence under `error`."""
    from distdl.serving.requests import MOST_BYTES, RequestError, parse

    try:
        images, top_k = parse(request.stream.read(MOST_BYTES + 1), request.content_type)
        answers = [answer.result() for answer in batcher.submit(images, top_k)]
        return AMLResponse({"predictions": answers}, 200, json_str=True)
    except RequestError as refused:
        return AMLResponse({"error": refused.sentence}, refused.status, json_str=True)
