"""The goodput benchmark reads from its ranks' notes which steps and samples count."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import goodput

# rank and process -> (time, step, ranks): step 2 is done, lost and done again by the rank left over
NOTES = {
    "0-11": [(10.0, 1, 2), (11.0, 2, 2)],
    "1-12": [(10.0, 1, 2), (11.0, 2, 2)],
    "0-21": [(14.0, 2, 1), (15.0, 3, 1)],
}
SAMPLES = {1: ("0 1 2 3", "4 5 6 7"), 2: ("8 9 10 11", "12 13 14 15")}
ALONE = {2: "8 9 10 11 12 13 14 15", 3: "16 17 18 19 20 21 22 23"}


@pytest.fixture
def training(tmp_path: Path) -> goodput.Training:
    for name, notes in NOTES.items():
        lines = [
            f"{time} {step} {ranks} {SAMPLES[step][int(name[0])] if ranks > 1 else ALONE[step]}\n"
            for time, step, ranks in notes
        ]
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    return goodput.Training(tmp_path, 3, kills=[11.5])


def test_what_counts_is_the_last_that_was_done(training: goodput.Training) -> None:
    training.read()
    assert training.wrong_samples == 0
    assert training.healing == [3.5]
    assert training.goodput == pytest.approx(3 * 1.0 / 5.0)


def test_a_sample_that_is_lost_and_one_that_is_repeated_are_wrong(
    training: goodput.Training,
) -> None:
    path = training.folder / "0-21.txt"
    path.write_text(path.read_text().replace(" 23\n", " 22\n"))
    training.read()
    assert training.wrong_samples == 2
