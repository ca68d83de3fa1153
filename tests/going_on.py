"""`pytest -p tests.going_on` leaves out what has passed before: `make matrix` takes hours.

A test runs again if anything of distdl or the test's own file has changed, or if it was skipped.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

# What is tested, and with which versions; without what `make bench` writes.
CODE = (
    "src",
    "launchers",
    "native",
    "benchmarks",
    "website",
    "pyproject.toml",
    "constraints.txt",
    ":!benchmarks/results",
    ":!*.md",
)
LIST = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(GoingOn(config), "going-on")


class GoingOn:
    """The tests that have passed, a line each, in a file whose name is the digest of the code."""

    def __init__(self, config: pytest.Config) -> None:
        root = config.rootpath
        # As they are when it starts: somebody may change them while it runs.
        self.files = {name: digest(root, [name]) for name in names_of(root, "tests/*.py")}
        code = digest(root, names_of(root, *CODE))
        assert config.cache is not None
        self.record = config.cache.mkdir("passed") / code
        self.passed = {*self.record.read_text().splitlines()} if self.record.exists() else set()
        self.records = not hasattr(config, "workerinput")  # else another process does
        self.failed: set[str] = set()
        self.called: set[str] = set()
        self.left_out = 0

    def line(self, node: str) -> str:
        """The test and its file's digest."""
        # In some of its processes, pytest-xdist adds the test's group: "...[parameters]@group".
        at = node.rfind("@")
        if at > node.rfind("]"):
            node = node[:at]
        return f"{self.files.get(node.partition('::')[0], '')} {node}"

    def pytest_report_header(self) -> str:
        return (
            f"going on: {len(self.passed)} tests have passed with this code, and are left out if "
            f"their files are the same (all again: delete {self.record})"
        )

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        left_out: list[pytest.Item] = []
        to_run: list[pytest.Item] = []
        for item in items:
            if self.line(item.nodeid) in self.passed:
                left_out.append(item)
            else:
                to_run.append(item)
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = to_run
            self.left_out = len(left_out)
        # By which a process of pytest-xdist answers the one that has started it.
        output = getattr(config, "workeroutput", None)
        if output is not None:
            output["left_out"] = self.left_out

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self.records:
            return
        if report.failed:
            self.failed.add(report.nodeid)
        if report.when == "call" and report.passed:
            self.called.add(report.nodeid)
        if report.when == "teardown" and report.nodeid in self.called - self.failed:
            with self.record.open("a") as file:
                file.write(f"{self.line(report.nodeid)}\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        """Each process of pytest-xdist has collected all tests; one that crashed says nothing."""
        left_out = getattr(node, "workeroutput", {}).get("left_out", 0)
        self.left_out = max(self.left_out, left_out)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.left_out:
            session.exitstatus = pytest.ExitCode.OK


def names_of(root: Path, *patterns: str) -> list[str]:
    """Files that git knows or would add, relative to the root."""
    listed = subprocess.check_output([*LIST, *patterns], cwd=root, text=True)
    return sorted(name for name in listed.split("\0") if (root / name).is_file())


def digest(root: Path, names: Iterable[str]) -> str:
    value = hashlib.sha256()
    for name in names:
        content = (root / name).read_bytes()
        value.update(f"{name} {len(content)}\n".encode())
        value.update(content)
    return value.hexdigest()[:16]
