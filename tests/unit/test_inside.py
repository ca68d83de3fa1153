"""Names of a far store: none leads out of the folder, and each that is left out is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from distdl.util import safe_paths
from distdl.util.safe_paths import places

BAD = {
    **dict.fromkeys(("../x", "a/../../x", "a/..", ".."), "leads out"),
    **dict.fromkeys(("/etc/passwd", "//host/share", "C:/x", "c:x"), "is absolute"),
    **dict.fromkeys(("", "a//b", "a/", "./a"), "has an empty part"),
    **dict.fromkeys(("a\\..\\b", "a\0b", "a\nb", "a\x1b[2Jb", "\udcff"), "has a character"),
    "a/" + "b" * 201: "longer than 200 bytes",
}


@pytest.mark.parametrize("name", BAD, ids=ascii)
def test_a_name_that_is_no_path_is_left_out(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert places(tmp_path, [name, "good"]) == {"good": tmp_path / "good"}
    said = capsys.readouterr().err
    assert said.startswith(f"left out   {name!a}: ") and BAD[name] in said
    assert said.count("\n") == 1


def test_ordinary_names_go(tmp_path: Path) -> None:
    names = ["a b/Größe…", "..a", "a..", ".hidden", "-rf", "%2e%2e", "~", "$(id)", "ab:c", "con"]
    assert list(places(tmp_path, names)) == names


def test_a_link_that_lies_here_is_not_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    (here / "real/deep").mkdir(parents=True)
    (here / "real/deep/file").touch()
    (here / "out").symlink_to(tmp_path)
    (here / "real/back").symlink_to(here / "real")
    (here / "last.ckpt").symlink_to(tmp_path / "mine")
    names = ["out/x", "real/back/x", "last.ckpt", "real/deep/file/x", "real/deep", "real/new"]
    assert list(places(here, names)) == ["real/new"]
    assert capsys.readouterr().err.count("is a link here") == 3
    # The folder itself may be one: that is how the user calls it.
    (tmp_path / "alias").symlink_to(here)
    assert list(places(tmp_path / "alias", ["x"])) == ["x"]


def test_a_file_and_a_folder_of_one_name(tmp_path: Path) -> None:
    assert list(places(tmp_path, ["a", "a/b"])) == ["a/b"]


def test_names_that_differ_by_capitals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(places(tmp_path, ["A", "a"])) == (1 if safe_paths.capitals_are_one(tmp_path) else 2)
    monkeypatch.setattr(safe_paths, "capitals_are_one", lambda folder: True)
    assert list(places(tmp_path, ["A/x", "a/X", "b"])) == ["A/x", "b"]
    assert "where capitals do not count" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_what_the_run_itself_wrote_here_stays(tmp_path: Path) -> None:
    own = ["config.yaml", "provenance.json", "attempts/001/launch.yaml", "attempts/001/job.json"]
    assert list(places(tmp_path, own)) == own  # the first time there is none
    for name in own:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert list(places(tmp_path, [*own, "a/config.yaml"])) == ["a/config.yaml"]
