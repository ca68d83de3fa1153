"""A machine without a compiler."""

from __future__ import annotations

import os
import sys

import pytest

from distdl.models import compilers
from distdl.util.errors import UserError
from tests.unit.sample_data import classifier


def test_without_a_compiler_it_is_refused(monkeypatch, tmp_path):
    compilers.refuse_without_compiler("cpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for device in ("cpu", "gpu"):
        with pytest.raises(UserError, match=r"(?s)compiler.*model.compile=false"):
            compilers.refuse_without_compiler(device)
    with pytest.raises(UserError):
        classifier(compile="max-autotune").configure_model()
    monkeypatch.setenv("CXX", sys.executable)  # there is one, of another name, and no Python.h
    monkeypatch.setattr(compilers.sysconfig, "get_path", lambda *_: str(tmp_path))
    with pytest.raises(UserError, match=r"Python\.h(?s:.*)python3-dev"):
        compilers.refuse_without_compiler("cpu")
    monkeypatch.setenv("CPATH", f"{os.pathsep}{tmp_path}")
    (tmp_path / "Python.h").touch()
    compilers.refuse_without_compiler("cpu")
    monkeypatch.setenv(compilers.FOLDER, "/mine")  # for what it compiles
    compilers.keep_results()
    assert os.environ[compilers.FOLDER] == "/mine"


@pytest.mark.parametrize(
    ("setting", "device", "why_not", "mode", "told"),
    [
        ("auto", "cuda", "", "default", "compiles the network"),
        ("auto", "cuda", "nothing is trained", None, "is off: nothing is trained"),
        ("auto", "cpu", "", None, "is off: this is no GPU"),
        (True, "cpu", "", "default", ""),
        ("max-autotune", "cuda", "nothing is trained", "max-autotune", ""),
        (False, "cuda", "", None, ""),
        ("measured", "cuda", "", None, ""),
    ],
)
def test_auto_compiles_on_a_gpu_and_says_so(
    setting, device, why_not, mode, told, monkeypatch, caplog
):
    monkeypatch.setattr(compilers, "missing", lambda device: "")
    with caplog.at_level("INFO"):
        assert compilers.mode_of(setting, device, why_not) == mode
    assert told in caplog.text
    assert len(caplog.messages) == bool(told)


def test_auto_does_without_a_compiler(monkeypatch, caplog):
    monkeypatch.setattr(compilers, "missing", lambda device: "needs gcc")
    with caplog.at_level("INFO"):
        assert compilers.mode_of("auto", "cuda") is None
    assert "model.compile=auto is off: needs gcc" in caplog.text


def test_auto_compiles_nothing_where_nothing_is_trained():
    module = classifier(compile="auto")
    module.configure_model()
    assert module.network._compiled_call_impl is None
