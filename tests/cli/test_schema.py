"""`schema`: editors know what a config file may hold. The schemas are asked by jsonschema, and, in
the matrix, by npm's yaml-language-server as an editor asks it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from omegaconf._utils import get_yaml_loader

from distdl.cli.schema import CONFIGS
from distdl.config.compose import compose
from distdl.config.recipe import recipe_of, to_yaml
from distdl.tools.editor import arguments, options, schemas, vscode
from distdl.validation.targets import Trust
from tests.conftest import ROOT, matrix_only
from tests.misspelt import MISSPELT

EXAMPLE = ROOT / "examples/my_project"
# The documents' files are about classes that are on the same page.
PAGES = [
    page.relative_to(ROOT / "docs").as_posix()
    for page in sorted(ROOT.glob("docs/**/*.md"))
    if "\n```yaml conf/" in page.read_text(encoding="utf-8")
]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Iterator[Path]:
    """A project with a module, data, a group and a package of its own."""
    folder = tmp_path_factory.mktemp("schema") / "project"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("outputs", "__pycache__"))
    for group, name, text in (
        ("size", "tiny", "# @package _global_\ndata:\n  batch_size: 8\n"),
        ("model/network", "mlp", "_target_: torchvision.ops.MLP\nin_channels: 4\n"),
    ):
        file = folder / "conf" / group / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    yield folder


@pytest.fixture(scope="module")
def found(project) -> Iterator[schemas.Schemas]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        yield schemas.read()


@pytest.fixture(scope="module")
def validators(found) -> dict[str, Draft7Validator]:
    documents = {name: found.document(name) for name in found.names}
    for document in documents.values():
        Draft7Validator.check_schema(document)
    return {name: Draft7Validator(document) for name, document in documents.items()}


def kind_of(file: str) -> str:
    """The schema of a file of `conf`."""
    group = Path(file).parent.name
    if group in ("experiment", "debug", "size"):
        return "experiment"
    return "spaces" if group == "tune" else group


def mistakes(validator: Draft7Validator, text: str) -> set[int]:
    """The lines of what a file must not hold."""
    content = yaml.load(text, Loader=get_yaml_loader())
    lines = dict(lines_of(yaml.compose(text, Loader=get_yaml_loader()), ()))
    found = set()
    for error in validator.iter_errors(content):
        for each in deepest(error):
            path = tuple(each.absolute_path)
            extra = []
            if each.validator == "additionalProperties" and each.validator_value is False:
                known = each.schema.get("properties", {})
                patterns = "|".join(each.schema.get("patternProperties", {})) or "$."
                others = [key for key in each.instance if key not in known]
                extra = [key for key in others if not re.search(patterns, str(key))]
            found |= {lines[(*path, key)] for key in extra} or {lines[path]}
    return found


def deepest(error: Any) -> list[Any]:
    """Of alternatives that all fail, those that got the farthest."""
    if not error.context:
        return [error]
    reached = max(len(each.absolute_path) for each in error.context)
    if reached == len(error.absolute_path):
        return [error]
    return [
        e for each in error.context if len(each.absolute_path) == reached for e in deepest(each)
    ]


def lines_of(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], int]]:
    yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from lines_of(value, (*path, key.value))
            yield (*path, key.value), key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from lines_of(value, (*path, index))


@pytest.mark.parametrize("file", sorted(ROOT.glob("conf/*/*.yaml")), ids=lambda f: f.stem)
def test_shipped_files_are_accepted(file, validators):
    text = file.read_text(encoding="utf-8")
    assert mistakes(validators[kind_of(str(file))], text) == set()


def test_the_primary_config_is_accepted(validators):
    assert mistakes(validators["config"], (ROOT / "conf/distdl.yaml").read_text()) == set()


@pytest.mark.parametrize(
    "file", sorted(ROOT.glob("examples/*/conf/*/*.yaml")), ids=lambda f: f.stem
)
def test_files_of_examples_are_accepted(file, validators):
    text = file.read_text(encoding="utf-8")
    # Other examples have options of their own, which are not in this project.
    others = r"override /(model|data): (unet|masks)"
    text = re.sub(others, r"override /\1: null", text)
    assert mistakes(validators[kind_of(str(file))], text) == set()


def write_page(page: str, folder: Path) -> None:
    """The files that a document has a reader write, or copy."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    copies = re.findall(r"^(?:mkdir|cp|sed) .*$", text, re.MULTILINE)
    for line in ("", *copies):
        if line:
            subprocess.run(["bash", "-ec", line], cwd=folder, check=True)
        for path, body in re.findall(r"^```\w+ (\S+\.\w+)\n(.*?)^```$", text, re.M | re.S):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(body, encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_files_of_documents_are_accepted(page, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_page(page, tmp_path)
    check_conf(tmp_path, schemas.Schemas(options.read(), found.known))


@matrix_only
@pytest.mark.parametrize("page", PAGES)
def test_files_of_documents_are_accepted_with_their_classes(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_page(page, tmp_path)
    check_conf(tmp_path, schemas.read())


def check_conf(folder: Path, found: schemas.Schemas) -> None:
    for file in sorted(folder.glob("conf/**/*.yaml")):
        validator = Draft7Validator(found.document(kind_of(str(file))))
        assert mistakes(validator, file.read_text(encoding="utf-8")) == set(), file


@pytest.mark.parametrize("each", MISSPELT, ids=str)
def test_typos_are_refused_with_their_line(each, validators):
    kind = "experiment" if each.kind == "debug" else each.kind
    assert mistakes(validators[kind], each.text) == {each.line}


ACCEPTED = """\
# @package _global_
defaults:
  - forecast
  - /size: tiny
  - override /launcher: ${oc.env:WHERE,local}
  - optional /model/network@model.network: mlp
  - override hydra/job_logging: none
seed: ${oc.env:SEED,0}
tags: ${data.tags}
data: ${other.data}
trainer:
  devices: "0,1"
  precision: 16
  max_epochs: ???
  max_time: {hours: 12}
  limit_train_batches: ${oc.env:LIMIT}
  gradient_clip_val: 1e-1
  sync_batchnorm: yes
  log_every_n_steps: 1_000
  profiler: {_target_: lightning.pytorch.profilers.SimpleProfiler, filename: x}
optimizer:
  _target_: mine.optim.Own
  anything: 1
model:
  network:
    _target_: torch.nn.Sequential
    _args_: [{_target_: torch.nn.Linear, in_features: 4, out_features: 1}]
callbacks:
  progress: null
  mine: {_target_: mine.callbacks.Mine, every: 3}
launcher:
  env: {OMP_NUM_THREADS: "1"}
"""


def test_what_people_write_is_accepted(validators):
    assert mistakes(validators["experiment"], ACCEPTED) == set()


@pytest.mark.parametrize("experiment", ["resnet50_ddp", "maskrcnn_coco", "forecast"])
def test_a_composed_config_is_accepted(experiment, validators, project, monkeypatch):
    monkeypatch.chdir(project)
    config = compose(
        [f"experiment={experiment}", "data.root=x"]
        if "coco" in experiment
        else [f"experiment={experiment}"]
    )
    config.pop("hydra")
    assert mistakes(validators["config"], to_yaml(config)) == set()
    assert mistakes(validators["config"], to_yaml(recipe_of(config))) == set()
    config.optimiser = {}
    assert len(mistakes(validators["config"], to_yaml(config))) == 1


def test_an_editor_shows_what_the_comments_say(validators):
    rate = validators["optimizer"].schema["definitions"]["optimizer.torch.optim.SGD"]
    assert "per lr_reference_batch" in rate["properties"]["lr"]["description"]
    kept = validators["experiment"].schema["definitions"]["file.experiment"]["properties"]
    assert "newest" in kept["checkpoint"]["properties"]["keep_last"]["description"]
    slurm = validators["launcher"].schema["definitions"]
    (settings,) = (each for name, each in slurm.items() if name.endswith(".SlurmLauncher"))
    assert settings["properties"]["walltime"]["description"]


def test_a_class_that_cannot_be_read_is_said_and_open(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    conf = tmp_path / "conf/model"
    conf.mkdir(parents=True)
    (conf / "theirs.yaml").write_text("_target_: somebody.Else\nwidth: 3\n")
    (conf / "broken.yaml").write_text("_target_: [\n")
    known = arguments.Known({"somebody.Else": arguments._read_one("somebody.Else", Trust())}, {})
    found = schemas.Schemas(options.read(), known)
    assert found.unread.keys() == {"somebody.Else", "conf/model/broken.yaml"}
    open_to_all = Draft7Validator(found.document("model"))
    assert mistakes(open_to_all, "_target_: somebody.Else\nany: 1\n") == set()


def test_settings_keep_what_is_there(found, project, tmp_path, monkeypatch):
    monkeypatch.chdir(project)
    settings = project / ".vscode/settings.json"
    settings.parent.mkdir()
    settings.write_text('{"editor.tabSize": 2, "yaml.schemas": {"./mine.json": ["a.yaml"]}}')
    written = vscode.write(found, Path(".vscode"))
    vscode.write(found, Path(".vscode"))  # its own files are replaced
    kept = json.loads(settings.read_text())
    assert kept["editor.tabSize"] == 2
    assert kept["yaml.yamlVersion"] == "1.1"
    assert kept["yaml.schemas"]["./mine.json"] == ["a.yaml"]
    assert kept["yaml.schemas"]["./.vscode/schemas/model.json"] == ["conf/model/*.yaml"]
    assert kept["yaml.schemas"]["./.vscode/schemas/spaces.json"] == ["conf/tune/*.yaml"]
    experiments = kept["yaml.schemas"]["./.vscode/schemas/experiment.json"]
    assert {"conf/experiment/**/*.yaml", "conf/size/tiny.yaml"} <= {*experiments}
    assert written.schemas.keys() == {*CONFIGS, "part"}
    for text, code in (('{\n  // mine\n  "a": 1\n}', "unreadable"), ("[]", "wrong-type")):
        settings.write_text(text)
        with pytest.raises(vscode.UserError) as refused:
            vscode.write(found, Path(".vscode"))
        assert refused.value.problems[0].code == code
        assert settings.read_text() == text
    other = tmp_path / "schemas/model.json"
    other.parent.mkdir()
    other.write_text("{}")
    with pytest.raises(vscode.UserError, match="is there already"):
        vscode.write(found, tmp_path)
    assert other.read_text() == "{}"


def test_the_command(command, tmp_path, found, monkeypatch):
    monkeypatch.setattr(schemas, "read", lambda: found)
    said = command("schema", "experimant")
    assert said.code == 2
    assert "did you mean: python -m distdl schema experiment" in said.err
    assert command("schema").code == command("schema", "model", "--write", "x").code == 2
    said = command("schema", "--write", ".vscode")
    assert said.code == 0, said
    assert "conf/model/*.yaml" in said.out
    assert (tmp_path / ".vscode/settings.json").is_file()
    said = command("schema", "optimizer")
    document = json.loads(said.out)
    assert mistakes(Draft7Validator(document), "_target_: torch.optim.SGD\nlrr: 1\n") == {2}


class Server:
    """yaml-language-server, as an editor drives it: messages over its streams."""

    def __init__(self, command: str, folder: Path) -> None:
        self.process = subprocess.Popen(
            [command, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder
        )
        self.settings = json.loads((folder / ".vscode/settings.json").read_text())
        self.folder = folder
        self.said: dict[str, list[Any]] = {}
        self.number = 0
        root = folder.as_uri()
        capabilities = {"workspace": {"configuration": True, "workspaceFolders": True}}
        self.ask(
            "initialize",
            {
                "processId": os.getpid(),
                "rootUri": root,
                "capabilities": capabilities,
                "workspaceFolders": [{"uri": root, "name": "x"}],
            },
        )
        self.send("initialized", {})
        self.send("workspace/didChangeConfiguration", {"settings": {}})

    def ask(self, method: str, params: Any) -> None:
        self.number += 1
        self._write({"jsonrpc": "2.0", "id": self.number, "method": method, "params": params})
        self.read_until(lambda message: message.get("id") == self.number and "result" in message)

    def send(self, method: str, params: Any) -> None:
        self._write({"jsonrpc": "2.0", "method": method, "params": params})

    def diagnose(self, file: Path) -> set[int]:
        """The lines that the server marks in a file."""
        uri = file.as_uri()
        document = {"uri": uri, "languageId": "yaml", "version": 1, "text": file.read_text("utf-8")}
        self.said.pop(uri, None)
        self.send("textDocument/didOpen", {"textDocument": document})
        self.read_until(lambda message: uri in self.said)
        return {each["range"]["start"]["line"] + 1 for each in self.said[uri]}

    def read_until(self, done: Any) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            message = self._read()
            if message.get("method") == "textDocument/publishDiagnostics":
                params = message["params"]
                self.said[params["uri"]] = params["diagnostics"]
            elif message.get("method") == "workspace/configuration":
                sections = [each.get("section") for each in message["params"]["items"]]
                prefix = "yaml."
                ours = {
                    k.removeprefix(prefix): v
                    for k, v in self.settings.items()
                    if k.startswith(prefix)
                }
                ours |= {"validate": True, "schemaStore": {"enable": False}}
                values = [ours if section == "yaml" else {} for section in sections]
                self._write({"jsonrpc": "2.0", "id": message["id"], "result": values})
            elif "method" in message and "id" in message:
                self._write({"jsonrpc": "2.0", "id": message["id"], "result": None})
            if done(message):
                return
        raise TimeoutError("yaml-language-server did not answer")

    def _write(self, message: Any) -> None:
        body = json.dumps(message).encode()
        assert self.process.stdin
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.process.stdin.flush()

    def _read(self) -> Any:
        stream = self.process.stdout
        assert stream
        length = 0
        while line := stream.readline().strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return json.loads(stream.read(length))


@matrix_only
def test_an_editor_shows_the_same(found, project, monkeypatch):
    program = shutil.which("yaml-language-server")
    if program is None:
        pytest.skip("yaml-language-server is not installed: make servers")
    monkeypatch.chdir(project)
    shutil.rmtree(project / ".vscode", ignore_errors=True)
    vscode.write(found, Path(".vscode"))
    server = Server(program, project)
    try:
        wrong = {}
        for each in MISSPELT:
            file = project / "conf" / each.kind / f"{each.name}.yaml"
            file.parent.mkdir(exist_ok=True)
            file.write_text(each.text)
            wrong[str(each)] = server.diagnose(file), {each.line}
            file.unlink()
        assert {name: both for name, both in wrong.items() if both[0] != both[1]} == {}
        people = project / "conf/experiment/people.yaml"
        people.write_text(ACCEPTED)
        assert server.diagnose(people) == set()
        people.unlink()
        for file in sorted(ROOT.glob("conf/*/*.yaml")):
            copy = project / "conf" / file.parent.name / f"copied_{file.name}"
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(file, copy)
            assert server.diagnose(copy) == set(), file
            copy.unlink()
    finally:
        server.process.kill()
        server.process.wait()
