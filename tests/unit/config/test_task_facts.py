"""Tasks: what is read of them without an import, what they are, and that they are what was read."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from distdl.config import task_facts
from distdl.util.errors import UserError
from distdl.validation.kinds import KINDS
from tests.house import FILES, package
from tests.unit.sample_config import check_parts, node, problems, rows
from tests.written import write

# Importing it would end Python.
KINDS_OF_TASKS = """
import os, mine.base as base
from distdl import tasks
from distdl.tasks import Task as Base, train
from .base import Measures
os._exit(3)
class Plain(Base["Built"]):
    needs_build: bool = False
    calls = ("predict_step",)
class Trains(train): ...
class Checks(tasks.validate): evaluates = not True
class Near(Measures): examines = True
class Far(base.Measures): ...
class Both(Mixin, Plain, Trains): ...
other = renamed = Trains
def function(context): ...
try:
    import nowhere
    class Guarded(nowhere.Task): ...
except ImportError:
    class Tried(Base):
        evaluates = True
        class Inner(Base):
            examines = True
if True:
    from .base import *
from .broken import *
from .nowhere import *
try:
    from nowhere import Measures as Measured
except ImportError:
    from .base import Measures as Measured
try:
    from .base import Measures as Here
except ImportError:
    from nowhere import Measures as Here
class OfAll(Starred): ...
class OfThere(Measured): ...
class OfHere(Here): ...
class Twice(Base): ...
class Twice(Base):
    examines = True
"""
PROJECT = {
    "mine/__init__.py": "",
    "mine/tasks.py": KINDS_OF_TASKS,
    "mine/base.py": """
from distdl.tasks import Task
class Measures(Task):
    evaluates = True
class Starred(Task):
    trains = True
""",
    "mine/broken.py": "class Broken(:\n",
}
# The name | what is not as of a plain function.
READ = """
distdl.tasks.train | trains calls
distdl.tasks.validate | evaluates calls
distdl.tasks.test | evaluates calls
distdl.tasks.predict | evaluates calls
distdl.tasks.benchmark | calls
distdl.tasks.doctor | examines needs_build
mine.tasks.Plain | needs_build calls
mine.tasks.Trains | trains calls
mine.tasks.renamed | trains calls
mine.tasks.Checks | evaluates calls
mine.tasks.Near | evaluates examines
mine.tasks.Far | evaluates
mine.tasks.Both | trains needs_build calls
mine.tasks.Tried | evaluates
mine.tasks.Tried.Inner | examines
mine.tasks.OfAll | trains
mine.tasks.OfThere | evaluates
mine.tasks.OfHere | evaluates
mine.tasks.Twice | examines
mine.tasks.nowhere.Absent | -
mine.tasks.function | -
mine.tasks.Absent | -
mine.broken.Broken | -
nowhere.Task | -
a b/c | -
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    write(tmp_path, PROJECT)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "facts"), rows(READ))
def test_what_a_task_says_is_read_without_an_import(project, name, facts):
    read = task_facts.of_target(name)
    plain = task_facts.of_target("mine.tasks.function")
    different = [n for n in task_facts.NAMES if getattr(read, n) != getattr(plain, n)]
    assert different == [each for each in facts[0].split() if each != "-"]


def test_a_damaged_distdl_says_so(monkeypatch):
    monkeypatch.setattr(task_facts, "BASE", "distdl.worker.lost.Task")
    with pytest.raises(UserError, match=r"distdl.worker.lost.Task is not found(?s:.*)install"):
        task_facts.of_target("distdl.tasks.train")


def test_launching_needs_no_torch_to_ask():
    code = (
        "import sys; from distdl.config import task_facts as t; f = t.of_target"
        "('distdl.tasks.predict'); assert f.evaluates and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# A user's class in task_of_mine.py | what is read of the refusal.
REFUSED = """
class T(Task): run = None; trains = bool(1) | has trains = True, and its source, | says False | body
class T(Task): run = None; calls = ("x_step",) | task: needs x_step, which | define it
class T(Task): trains = True | is abstract: it does not define run
class T: ... | task_of_mine.T is a class, but not a Task | derive it from distdl.tasks.Task, or name
def T(): ... | task: takes 0 positional arguments, 1 are passed
def T(context, top): ... | task.top: missing
"""


@pytest.mark.parametrize(("source", "parts"), rows(REFUSED))
def test_a_task_that_is_not_what_was_read_is_refused(tmp_path, source, parts):
    write(tmp_path, {"task_of_mine.py": f"from distdl.tasks import Task\n{source}\n"})
    try:
        (problem,) = problems({"task": node("task_of_mine.T")}, root=tmp_path)
    finally:
        sys.modules.pop("task_of_mine", None)
    check_parts(str(problem), parts)


def test_functions_of_a_kind_are_known_by_what_they_return():
    """A config may come from somebody else: it can call none of distdl's helpers."""
    taken = {"task": set(), "schedule": set()}
    for home, section in {"tasks": "task", "optim": "schedule"}.items():
        for name in [name for name in FILES if package(name) == home]:
            __import__(name)
            for each in vars(sys.modules[name]).values():
                methods = vars(each).values() if inspect.isclass(each) else ()
                functions = filter(inspect.isfunction, (each, *methods))
                taken[section] |= {x.__name__ for x in functions if KINDS[section].takes(x)}
    assert taken["task"] == {"_evaluate"}, "its name is private, so that it is refused"
    assert taken["schedule"] == {
        "constant",
        "warmup_cosine",
        "warmup_linear",
        "warmup_step",
        "_to_the_end",
        "_warmed_up",
    }
