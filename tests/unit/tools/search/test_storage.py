"""Where a study is kept: an address without its password, one folder for its trials, journals."""

import sys
from urllib.parse import quote

import pytest

from distdl.tools.search import spaces, storage
from distdl.tools.search.engine import SearchEngine, TrialEnd
from distdl.tools.search.objectives import Objective
from distdl.tools.search.storage import JOURNAL, Address
from distdl.util.errors import UserError
from tests.conftest import TINY

optuna = pytest.importorskip("optuna")

ACCURACY = Objective("val/acc1", "max")
LOSS = Objective("val/loss", "min")
# With a slash, which SQLAlchemy allows there, and no pattern of URLs knows.
PASSWORD = "/".join(("pw", "Tr0ub4dor"))


def engine(folder, address=None, objective=ACCURACY):
    searched = spaces.parsed(["optimizer.lr=log(0.01,1)", "optimizer=sgd,adamw"])
    folder.mkdir(exist_ok=True)
    return SearchEngine(searched, folder, "s", [objective], seed=0, address=address)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A database with Optuna's tables, which take a second to make."""
    path = tmp_path_factory.mktemp("template") / "study.db"
    optuna.storages.RDBStorage(f"sqlite:///{path}")
    return path.read_bytes()


@pytest.fixture
def database(template, tmp_path):
    (tmp_path / "study.db").write_bytes(template)
    return Address.of(f"sqlite:///{tmp_path}/study.db")


def test_a_password_is_not_shown(monkeypatch):
    monkeypatch.setenv("STUDY_URL", f"postgresql://me:{PASSWORD}@db/x")
    monkeypatch.setenv("STUDY_PASSWORD", PASSWORD)
    for typed, expected in (
        (f"postgresql://me:{PASSWORD}@db/x", "postgresql://me:***@db/x"),
        (f"postgresql://me:{quote(PASSWORD, safe='')}@db/x", "postgresql://me:***@db/x"),
        (
            f"postgresql://db/x?user=me&password={PASSWORD}",
            "postgresql://db/x?password=***STUDY_PASSWORD***&user=me",
        ),
        ("${oc.env:STUDY_URL}", "${oc.env:STUDY_URL}"),
        ("postgresql://me:${oc.env:STUDY_PASSWORD}@db/x",) * 2,
    ):
        address = Address.of(typed)
        assert address.shown == expected
        assert "Tr0ub4dor" not in address.hidden(f"no route to {address.url}, as {PASSWORD}")
    assert Address.of("sqlite:////data/study.db").shown == "sqlite:////data/study.db"
    assert Address.of("${oc.env:STUDY_URL}").url == f"postgresql://me:{PASSWORD}@db/x"


REFUSED = {
    "study.db": "is no address of a database",
    "postgresql://db:port/x": "is no address of a database",
    "": "is no address of a database",
    "sqlite://": "a database in memory",
    "${oc.env:NO_SUCH_VARIABLE}": "NO_SUCH_VARIABLE is not set",
    "redis://localhost": "redis://localhost cannot be used",
    "sqlite:////no/such/folder/study.db": "unable to open database file",
    f"mysql://me:{PASSWORD}@db/x": "pip install mysqlclient",
}


@pytest.mark.parametrize("address", REFUSED)
def test_what_is_no_storage_is_refused_without_its_password(
    address, command, without_stage_2, tmp_path
):
    words = ("optimizer.lr=log(0.01,1)", f"--storage={address}", "name=s")
    said = command("tune", *TINY, *words)
    assert said.code == 2, said
    assert REFUSED[address] in said.err
    assert "Tr0ub4dor" not in said.out + said.err
    assert f"--storage={address}" in sys.argv or PASSWORD in address
    assert not any("Tr0ub4dor" in word for word in sys.argv), "runs record it"


def test_a_study_in_a_database_goes_on_in_its_folder_alone(database, tmp_path):
    first = engine(tmp_path / "a", database)
    number = first.propose().number
    first.tell(number, TrialEnd.COMPLETE, [0.5])
    first.propose()
    with pytest.raises(UserError, match="has its trials in another folder"):
        engine(tmp_path / "b", database)
    (tmp_path / "a").rename(tmp_path / "moved")
    again = engine(tmp_path / "moved", database)
    assert [each.end for each in again.known()] == [TrialEnd.COMPLETE, None]
    assert again.key == first.key


def test_of_two_searches_that_begin_a_study_at_once_one_goes_on(database, tmp_path):
    first = engine(tmp_path / "a", database)
    # It has looked before the first one was there, and writes after it.
    first.study.set_user_attr(storage.KEY, None)
    second = engine(tmp_path / "b", database)
    assert second.propose().number == 0
    with pytest.raises(UserError, match="has its trials in another folder"):
        first.propose()
    assert [each.number for each in second.known()] == [0]


def test_a_study_of_another_program_is_refused(database, tmp_path):
    study = optuna.create_study(storage=database.url, study_name="s", direction="maximize")
    with pytest.raises(UserError, match="another program"):
        engine(tmp_path / "a", database, LOSS)
    study.tell(study.ask(), 0.5)
    with pytest.raises(UserError, match="another program"):
        engine(tmp_path / "a", database)
    assert study.user_attrs == {}


def test_a_journal_that_is_none_is_refused(tmp_path):
    engine(tmp_path / "a").propose()
    journal = tmp_path / "a" / JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:1], b"half a li\n", *lines[1:]]))
    with pytest.raises(UserError, match="is no whole journal"):
        engine(tmp_path / "a")
