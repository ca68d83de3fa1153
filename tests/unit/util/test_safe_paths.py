"""Names of a far store: none leads out of the folder, and each that is left out is reported."""

from __future__ import annotations

from distdl.util import safe_paths
from distdl.util.safe_paths import local_paths

BAD = {
    **dict.fromkeys(("../x", "a/../../x", "a/..", ".."), "leads out"),
    **dict.fromkeys(("/etc/passwd", "//host/share", "C:/x", "c:x"), "is absolute"),
    **dict.fromkeys(("", "a//b", "a/", "./a"), "has an empty part"),
    **dict.fromkeys(("a\\..\\b", "a\0b", "a\nb", "a\x1b[2Jb", "\udcff"), "has a character"),
    "a/" + "b" * 201: "longer than 200 bytes",
}
ORDINARY = ["a b/Größe…", "..a", "a..", ".hidden", "-rf", "%2e%2e", "~", "$(id)", "ab:c", "con"]


def test_a_bad_name_is_left_out_and_ordinary_ones_go(tmp_path, capsys):
    assert local_paths(tmp_path, [*BAD, "good"]) == {"good": tmp_path / "good"}
    for line, (name, why) in zip(capsys.readouterr().err.splitlines(), BAD.items(), strict=True):
        assert line.startswith(f"left out   {name!a}: ")
        assert why in line
    assert list(local_paths(tmp_path, ORDINARY)) == ORDINARY
    assert list(local_paths(tmp_path, ["a", "a/b"])) == ["a/b"]


def test_a_link_in_the_folder_is_not_followed(tmp_path, capsys):
    folder = tmp_path / "folder"
    (folder / "real/deep").mkdir(parents=True)
    (folder / "real/deep/file").touch()
    (folder / "out").symlink_to(tmp_path)
    (folder / "real/back").symlink_to(folder / "real")
    names = ["out/x", "real/back/x", "real/deep/file/x", "real/deep", "real/new"]
    assert list(local_paths(folder, names)) == ["real/new"]
    assert capsys.readouterr().err.count("is a link here") == 2
    # The folder itself may be one: that is how the user calls it.
    (tmp_path / "alias").symlink_to(folder)
    assert list(local_paths(tmp_path / "alias", ["x"])) == ["x"]


def test_names_that_differ_by_capitals(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(safe_paths, "ignores_case", lambda folder: True)
    assert list(local_paths(tmp_path, ["A/x", "a/X", "b"])) == ["A/x", "b"]
    assert "which ignores case" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_what_the_run_itself_wrote_stays(tmp_path):
    own = ["config.yaml", "provenance.json", "attempts/001/launch.yaml", "attempts/001/job.json"]
    assert list(local_paths(tmp_path, own)) == own  # the first time there is none
    for name in own:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert list(local_paths(tmp_path, [*own, "a/config.yaml"])) == ["a/config.yaml"]
