"""What of a config makes a model that can be exported."""

from distdl.config import recipe


def test_an_export_that_is_refused_says_what_to_type():
    own = {"_target_": "mine.Net"}
    ours = {"_target_": "distdl.models.ImageClassifier"}
    synthetic = recipe.exportable_instead({"model": ours, "data": own}, "outputs/r")
    assert "data=imagenet data.root=FOLDER" in synthetic
    weights = "its weights alone: python -m distdl convert outputs/r --to weights"
    assert synthetic.endswith(weights)
    stored = {"_target_": "distdl.data.StoredImages"}
    assert recipe.exportable_instead({"model": own, "data": stored}, "outputs/r") == weights
