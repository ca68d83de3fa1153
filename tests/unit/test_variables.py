"""What a user writes goes into scripts, commands and YAML byte for byte, or is refused."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from distdl.job import JobSpec, Resources, variables
from distdl.launchers.azureml.client import Workspace
from distdl.launchers.azureml.launcher import AzureMLLauncher
from distdl.launchers.azureml.request import to_yaml
from distdl.launchers.local import LocalLauncher
from distdl.launchers.mpi import MpiLauncher
from distdl.launchers.sagemaker import SageMakerLauncher
from distdl.launchers.slurm import SlurmLauncher
from distdl.util.errors import UserError
from distdl.validation import rules
from distdl.validation.resolve import resolve

# What the script calls on a node; here it only records what it was given.
NODE = {
    "srun": 'env -0 > "$SEEN/env"; printf "%s\\0" "$@" > "$SEEN/arguments"',
    "scontrol": "echo localhost",
    "getent": "true",
}
NASTY = [
    *("a\n\n\n\nb\n", "\n#SBATCH --array=0-9\n"),
    "$(touch /tmp/x) `id` \"'\\ \\n \\x0a %s %% !! ~ * @env@ ${HOME}",
    "\r\n\t\x01\x1b[2J\x7f\x85\u2028\u2029\ufeff",
    *("Grüße 日本語 🎉\udce9", "", " ", "=", "yes", "1e3", "null", "- a: b # c"),
]
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
PLAIN = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"], exclude_characters='/":\\'),
    min_size=1,
    max_size=20,
).filter(lambda name: name.strip(".") != "")
few = hypothesis_settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def spec(store: str = "/shared/runs/e/first", **fields: Any) -> JobSpec:
    chosen = {"name": "e/first", "bundle": f"{store}/attempts/001/bundle", "attempt": 1, **fields}
    return JobSpec(store=store, resources=Resources(1, 2, "cpu"), **chosen)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    for name, text in NODE.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run(script: str, node: Path) -> tuple[dict[str, str], list[str]]:
    """Variables and arguments that srun gets of a script."""
    (node / "job.sh").write_text(script, encoding="utf-8")
    env = {"PATH": f"{node}:{os.environ['PATH']}", "SEEN": str(node), "SLURM_JOB_ID": "1"}
    subprocess.run(["bash", node / "job.sh"], env=env, check=True, capture_output=True)
    seen = [(node / name).read_bytes() for name in ("env", "arguments")]
    words = [os.fsdecode(part).split("\0")[:-1] for part in seen]
    return dict(word.split("=", 1) for word in words[0]), words[1]


@few
@given(TEXT, TEXT, PLAIN)
@example(NASTY[2], NASTY[0], "a b'$(id)`id`")
def test_bash_gets_every_value_and_path_byte_for_byte(
    node: Path, launcher_value: str, value: str, folder: str
) -> None:
    """Also through an array's cases, where lines are indented."""
    env = {f"N{number}": text for number, text in enumerate([*NASTY, value])}
    launcher = SlurmLauncher(env={"OF_LAUNCHER": launcher_value}, requeue=False)
    one, other = spec(f"/runs/{folder}", env=env), spec("/runs/other", env={"N0": "other"})
    for request in (launcher.request(one), launcher.request_sweep([one, other])):
        assert request is not None
        body = itertools.dropwhile(lambda line: line.startswith("#"), request.text.splitlines())
        assert not [line for line in body if line.startswith("#SBATCH")]
        script = request.text.replace("#!/bin/bash\n", "#!/bin/bash\nSLURM_ARRAY_TASK_ID=0\n")
        seen, arguments = run(script, node)
        assert {name: seen[name] for name in env} == env
        assert seen["OF_LAUNCHER"] == launcher_value
        assert arguments[-len(one.worker()) :] == list(one.worker())
        assert seen["PYTHONPATH"] == f"{one.bundle}/code"


@few
@given(TEXT)
@example("".join(NASTY).replace("\udce9", ""))
@example("\x85")
def test_yaml_for_azure_reads_back_the_same(value: str) -> None:
    content = {"environment_variables": {"A": value}}
    assert yaml.safe_load(to_yaml(content)) == content


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A=B", "A\nB", "É", "$(id)"])
def test_a_name_of_a_variable_is_checked_for_every_launcher(name: str) -> None:
    for section in ({"env": {name: "1"}}, {"forward_env": [name]}):
        (problem,) = rules.names(resolve({"launcher": section, "output_dir": "outputs"}))
        assert problem.path.startswith(("launcher.env.", "launcher.forward_env"))
        assert problem.path.isprintable() and problem.what.isprintable()
    for build in (
        lambda: spec(env={name: "1"}),
        lambda: spec(forward_env=(name,)),
        lambda: MpiLauncher(env={name: "1"}, flavour="openmpi4").request(spec()),
        lambda: SlurmLauncher(env={name: "1"}).request(spec()),
    ):
        with pytest.raises(UserError, match="is not a valid variable name"):
            build()


@pytest.mark.parametrize("value", [None, [1], {"a": 1}, "a\0b", "\ud800"])
def test_a_value_of_a_variable_is_checked(value: object) -> None:
    with pytest.raises(UserError, match=r"launcher\.env\.A: .* is not a valid variable value"):
        variables({"A": value})


@pytest.mark.parametrize("odd", ["\n", "\r", "\t", "\x1b", "\x85", "\u2028", "\udcff", "\0"])
def test_a_folder_or_a_name_of_several_lines_is_refused(odd: str) -> None:
    problems = [*rules.names(resolve({"output_dir": f"runs{odd}x"}))]
    for path, build in (
        ("output_dir", lambda: spec(f"/runs/a{odd}b")),
        ("name", lambda: spec(name=f"e/a{odd}b")),
    ):
        with pytest.raises(UserError) as error:
            build()
        problems += [p for p in error.value.problems if p.path == path]
    assert [problem.path for problem in problems] == ["output_dir", "output_dir", "name"]


@pytest.mark.parametrize(
    ("launcher", "store"),
    [
        *((SlurmLauncher(), store) for store in ('/runs/"a"', "/runs/a\\b", "/runs/a:b")),
        (SlurmLauncher(container="a.sif"), "/runs/a,b"),
        (MpiLauncher(flavour="openmpi4"), "/runs/a b"),
        (MpiLauncher(flavour="mpich"), "/runs/a:b"),
    ],
)
def test_a_folder_that_a_platform_would_misread_is_refused(launcher: Any, store: str) -> None:
    with pytest.raises(UserError, match="choose another output_dir"):
        launcher.request(spec(store))


def test_a_dry_run_can_be_copied_into_a_shell() -> None:
    assert "A='b c; id'" in LocalLauncher().request(spec(env={"A": "b c; id"})).render()


WORKSPACE = "azureml://subscriptions/s/resourceGroups/g/workspaces/w"


@pytest.mark.parametrize(
    "handle",
    [
        *(f"sagemaker://eu-west-1{rest}" for rest in ("/a/../b", "@evil.example/a", "/a?b#c")),
        *(f"{WORKSPACE}{rest}" for rest in ("/jobs/..", "/jobs/a?x=1", "#/jobs/a")),
        "azureml://subscriptions/s/resourceGroups/../workspaces/w/jobs/a",
    ],
)
def test_a_handle_does_not_lead_to_another_address(handle: str) -> None:
    launcher = SageMakerLauncher() if handle.startswith("sagemaker") else AzureMLLauncher()
    with pytest.raises(UserError) as error:
        launcher.attach(handle)
    assert [problem.path for problem in error.value.problems] == [handle]


def test_names_of_a_platforms_own_objects_are_checked() -> None:
    with pytest.raises(UserError) as error:
        Workspace.find("s/../t", "a group", "w?x")
    keys = ["launcher.subscription", "launcher.resource_group", "launcher.workspace"]
    assert [problem.path for problem in error.value.problems] == keys
    for prefix in ("../x", "a//b", "a b", "a\nb", "é"):
        problems = SageMakerLauncher.check({"prefix": prefix}, {"devices": 1, "accelerator": "cpu"})
        assert "prefix" in [problem.path for problem in problems], prefix
