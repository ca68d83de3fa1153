"""Which sample goes where, and what `prepare` answers to wrong words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from distdl.cli.prepare import main
from distdl.datasets import shard_plan as plans
from distdl.datasets.source import Sample
from distdl.util.errors import UserError
from tests.miniature import (
    SUBSET,
    prepare,
)


def samples(sizes: list[int]) -> list[tuple[str, Sample]]:
    return [
        (f"k{i}", Sample("train", f"k{i}", 0, size, (i // 4, i))) for i, size in enumerate(sizes)
    ]


def test_every_sample_is_in_exactly_one_shard():
    all_of_them = samples([100, 90_000, 5, 40_000, 40_000, 7, 120_000, 1] * 20)
    parts = list(plans.cut("train", all_of_them, 100_000))
    assert [s for part in parts for s in part.samples] == all_of_them
    assert [part.number for part in parts] == list(range(len(parts)))
    assert all(abs(part.bytes - 100_000) < 130_000 for part in parts)
    assert list(plans.cut("val", [], 1)) == []


def test_blocks_stay_whole():
    mixed = plans.shuffled(samples([1] * 40), seed=0, blocks=True)
    order = [sample.where[1] for _, sample in mixed]
    assert sorted(order) == list(range(40)) != order
    assert all(order[i : i + 4] == list(range(order[i], order[i] + 4)) for i in range(0, 40, 4))


def test_keys_are_safe_and_differ():
    keys = plans.Keys()
    names = ["a/b.c.JPEG", "a_b_c.png", "a/b.c", "über.jpg", "", "", "x" * 300, "y" + "x" * 300]
    made = [keys.make(name) for name in names]
    assert made[:5] == ["a_b_c", "a_b_c_2", "a_b_c_3", "_ber", "image"]
    assert len(set(made)) == len(names)
    assert all(len(key) < 90 and "." not in key for key in made)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "python -m distdl prepare imagenet"),
        (["imagnet"], "did you mean: python -m distdl prepare imagenet"),
        (["imagenet"], "required: --source, --to"),
        (["imagenet", "--shard-md", "3"], "required"),
        (["imagenet", "--source", "/nowhere", "--to", "x"], "no such folder"),
        (["folder", "--source", ".", "--to", "../x"], "must hold train/<class>/"),
        (["folder", "--source", ".", "--to", "x", "--shard-md", "3"], "did you mean: --shard-mb"),
        (["folder", "--source", ".", "--to", "x", "--workers", "0"], "--workers: 0 is less than 1"),
        (["folder", "--source", "", "--to", "x"], "--source: is empty"),
        (["folder", "--source", ".", "--to", ""], "--to: is empty"),
        (["folder", "--source", ".", "--to", "azure://a/b"], "--upload azure://a/b"),
        (["folder", "--source", ".", "--to", "x", "--upload", "ftp://b"], "ftp://b"),
    ],
)
def test_wrong_options_are_explained(words, said, tmp_path):
    with pytest.raises(UserError) as error:
        main(words)
    assert said in str(error.value)


def test_a_dry_run_writes_nothing(tars, tmp_path, capsys):
    assert prepare("imagenet", tars, tmp_path / "out", *SUBSET, "--dry-run") == 0
    assert "36 images" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_no_torch_is_loaded():
    code = (
        "import sys, distdl.cli.prepare, distdl.datasets.imagenet, distdl.datasets.folder\n"
        "print(sorted({'torch', 'lightning', 'hydra', 'omegaconf'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
