"""The code of an exported MLflow model, which MLflow copies into it ("models from code")."""

from __future__ import annotations

from typing import Any

import mlflow
import pandas
from mlflow.pyfunc import PythonModel, PythonModelContext


class ImageModel(PythonModel):
    """Encoded images in the column `image` to the columns `class`, `probability` and `top`."""

    def load_context(self, context: PythonModelContext) -> None:
        from distdl_scoring.scorer import Scorer

        self.scorer = Scorer(context.artifacts["model"], trust=True)

    def predict(
        self,
        context: PythonModelContext,
        model_input: pandas.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> pandas.DataFrame:
        return pandas.DataFrame(self.scorer.score(model_input["image"].tolist()))


mlflow.models.set_model(ImageModel())
