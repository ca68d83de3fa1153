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

scorer: Any = None


def init() -> None:
    """Loads the model of AZUREML_MODEL_DIR, or of a folder in it."""
    global scorer
    folder = next(Path(os.environ["AZUREML_MODEL_DIR"]).rglob("model.json")).parent
    sys.path.insert(0, str(folder))
    from distdl.tools.serving.scorer import Scorer

    scorer = Scorer(folder, trust=True)


@rawhttp
def run(request: AMLRequest) -> AMLResponse:
    """Answers one request: 200 with `predictions`, or 4xx with one sentence under `error`."""
    from starlette.exceptions import HTTPException

    from distdl.tools.serving.requests import MOST_BYTES, decoded, parse

    try:
        images, top_k = parse(request.stream.read(MOST_BYTES + 1), request.content_type)
        pixels = [decoded(scorer, number, data) for number, data in enumerate(images)]
        return AMLResponse({"predictions": scorer.answers(pixels, top_k)}, 200, json_str=True)
    except HTTPException as error:
        return AMLResponse({"error": error.detail}, error.status_code, json_str=True)
