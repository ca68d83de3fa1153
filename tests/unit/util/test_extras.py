"""Which package is missing, and what installs it."""

from __future__ import annotations

from importlib import metadata

import pytest

from distdl.util import extras


@pytest.mark.parametrize(
    ("module", "typed"),
    [
        ("onnxscript.ir", "pip install 'distdl[onnx]'"),
        ("faster_coco_eval", "pip install 'distdl[detection]'"),
        ("google_crc32c", "pip install 'distdl[data]'"),
        ("boto3", "pip install 'distdl[s3]'"),  # the first of two extras
        ("mlflow", "pip install mlflow"),  # distdl needs it, without an extra
        ("my_project", "pip install my_project"),
    ],
)
def test_the_extra_that_brings_a_package(module, typed):
    assert extras.install(module) == typed


def test_without_metadata_as_in_a_job(monkeypatch):
    def requires(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert extras.install("onnx") == "pip install onnx"


def test_the_module_behind_an_error():
    missing = ModuleNotFoundError("No module named 'onnx'", name="onnx")
    wrapped = RuntimeError("the export has failed")
    wrapped.__cause__ = missing
    assert extras.missing_module(missing) == "onnx"
    assert extras.missing_module(wrapped) == "onnx"
    # Another error while something else is tried says nothing of the first one.
    later = ValueError("too many dimensions")
    later.__context__ = missing
    assert extras.missing_module(later) == ""
    assert extras.missing_module(ImportError("cannot import name 'x'", name="torch")) == ""
