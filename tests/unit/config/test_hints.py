"""The tables of other tools' words: what is found in them, and that they are well formed."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
import yaml

from distdl.config.hints import lightning_1, tables, words
from tests.house import FILES


@pytest.mark.parametrize("file", [tables.OTHER_TOOLS, tables.LIGHTNING_1])
def test_a_name_occurs_once_in_a_section_and_has_a_text(file):
    text = files("distdl.config.hints").joinpath(file).read_text(encoding="utf-8")
    for section, rows in yaml.safe_load(text).items():
        names = [name for each in rows for name in each.split()]
        assert sorted(names) == sorted(set(names)), section
        assert all(isinstance(row, str) and row.strip() for row in rows.values()), section


def test_patterns_are_regular_expressions():
    for section in ("strategies", "precisions"):
        patterns = [*tables.patterns(tables.OTHER_TOOLS, section)]
        assert patterns
        for each in patterns:
            re.compile(each)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (words.for_key("hydra.run.dir"), "output_dir=FOLDER is the folder of all runs"),
        (words.for_key("batch.bs") or words.for_key("bs"), "data.batch_size=N, per device"),
        (words.for_choice("debug", "default"), "debug=cpu trainer.detect_anomaly=true"),
        (words.for_option("--config-name", []), "experiment=NAME takes conf/experiment/NAME.yaml"),
        (words.for_verb("fit", ["a=1"]), "python -m distdl a=1"),
        (words.strategy_for("deepspeed_stage_3"), "strategy=deepspeed_zero3"),
        (words.precision_for("fp16"), "write trainer.precision=16-mixed or bf16-mixed"),
        (words.TRAINER_OWNED["barebones"], "task=benchmark measures training steps alone"),
        (lightning_1.TRAINER["gpus"], "trainer.devices=N"),
        (lightning_1.HOOKS["training_epoch_end"], "on_train_epoch_end; keep the outputs"),
        (lightning_1.ARGUMENTS["hiddens"], "split the sequence in training_step"),
    ],
)
def test_what_to_write_instead(found, text):
    assert found.startswith(text)


def test_the_code_holds_no_table_of_words():
    code = FILES["distdl.config.hints.words"].read_text(encoding="utf-8")
    assert "nproc_per_node" not in code
    assert "resume_from_checkpoint" not in code
