"""The page of a study: what it shows, that it needs nothing but itself, and hostile names."""

import html
import random
import re

import pytest

from distdl.runs.directory import RunDirectory
from distdl.runs.records import encode
from distdl.tools.search import spaces, study_page
from distdl.tools.search.engine import Proposal, SearchEngine, TrialEnd
from distdl.tools.search.objectives import Objective
from distdl.tools.search.search import Search
from distdl.tools.search.trials import SearchTrial, TrialCurve

pytest.importorskip("optuna")

WORDS = ("optimizer.lr=log(0.001,1)", "data.batch_size=range(8,65,8)", "optimizer=sgd,adamw")
ACCURACY = Objective("val/acc1", "max")
# What a page would load, run or send.
ACTIVE = re.compile(r"<(script|iframe|object|embed|link|form|img|base)\b|<[^>]*\son\w+\s*=", re.I)
OWN = r"(?:data:|\#)"
ADDRESS = re.compile(rf"""\b(?:src|href)=(?!["']{OWN})|url\((?!["']?{OWN})|@import""", re.I)


def study(folder, count, words=WORDS, *, validations=5, why="", seed=0):
    """A study of trials whose rates of 0.1 are best; every third is pruned after its second
    validation, and every tenth has failed."""
    searched = spaces.parsed(words)
    engine = SearchEngine(searched, folder / "s", "s", [ACCURACY], sampler="random", seed=seed)
    draw = random.Random(seed)
    trials = []
    for _ in range(count):
        proposal = engine.propose()
        number = proposal.number
        end = TrialEnd.PRUNED if number % 3 == 1 else TrialEnd.COMPLETE
        end = TrialEnd.FAILED if number % 10 == 9 else end
        run = RunDirectory(folder / "s" / f"{number:08x}")
        curve = TrialCurve(run.path, ACCURACY.metric)
        curve.path.parent.mkdir(parents=True)
        length = {TrialEnd.PRUNED: 2, TrialEnd.FAILED: 0}.get(end, validations)
        values = [draw.random() * (each + 1) / validations for each in range(length)]
        lines = (encode(0.0, n, 1, {"val/acc1": value}) for n, value in enumerate(values))
        curve.path.write_bytes(b"".join(lines))
        curve.read()
        told = Proposal(number, proposal.values)
        trial = SearchTrial(told, "x=<b onclick=alert(1)>", run, curve, {}, end=end)
        trial.results = [max(values)] if end is TrialEnd.COMPLETE else []
        trial.why = why if end is TrialEnd.FAILED else ""
        engine.tell(number, end, trial.results)
        trials.append(trial)
    found = Search.__new__(Search)
    found.searched, found.engine, found.objective = searched, engine, ACCURACY
    found.folder, found.trials = folder / "s", trials
    return found


def test_a_page_needs_nothing_but_itself(tmp_path):
    found = study(tmp_path, 30, why="</script><script>alert(1)</script> & it's NaN")
    page = study_page.render(found)
    assert ACTIVE.findall(page) == []
    assert ADDRESS.findall(page) == []
    assert page.count("<style") == page.count("</style>") >= 1
    assert page.count("<svg") == page.count("</svg>") == 6, "curves, history, 3 slices, parallel"
    assert page.rstrip().endswith("</html>")
    assert "alert(1)</script>" not in page
    assert html.escape("</script>") in page
    rows = re.findall(r"<tr>.*?</tr>", page, re.S)
    named = [row for row in rows if re.search(r"<td[^>]*>0000", row)]
    assert len(named) == 30
    best = max(found.complete, key=lambda trial: trial.results[0])
    assert sum("complete, best" in row for row in named) == 1
    assert "complete, best" in named[best.number]
    assert len(page) < 400_000
