"""Model folders of somebody else: none executes anything when distdl loads it, each is refused in
one message. All checksums are right, since whoever writes the files writes them too."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import warnings
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from distdl.domains.classification.exports import of_classifier
from distdl.tools.serving import formats, model_folder
from distdl.tools.serving.exported_program import expression
from distdl.tools.serving.scorer import Scorer
from distdl.util.digests import sha256_of
from distdl.util.json_rules import Unsafe
from tests.conftest import distdl
from tests.serving.colours import photo

MATRIX = "DISTDL_MATRIX" in os.environ
SIDE = 32
CLASSES = ("red", "green", "blue")
MODEL = "models/model.json"
WEIGHTS, CONSTANTS = (f"data/{n}/model_{n}_config.json" for n in ("weights", "constants"))


class Small(torch.nn.Module):
    """With a weight, a constant, two sizes that depend on the batch, and a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.scale = torch.ones(3)

    def forward(self, images):
        flat = images.float().view(images.shape[0] * 3, -1).mean(1)
        return self.norm(self.layer(flat.view(-1, 3) * self.scale)).softmax(1)


class Executes:
    """Its pickle creates a file when it is read."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return open, (self.mark, "w")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder as `distdl export --to pt2` writes it."""
    folder = tmp_path_factory.mktemp("exported")
    model_folder.write_package(folder)
    formats.write_pt2(of_classifier(Small().eval(), SIDE), folder / "model.pt2")
    described = {"kind": "pt2", "classes": CLASSES, "image_size": SIDE, "short_side": 36}
    model_folder.describe(folder, described)
    return folder


class Foreign:
    """A copy of an export, whose parts a test replaces. `mark` is a file that exists once code of
    the copy was executed."""

    def __init__(self, source: Path, folder: Path):
        self.folder = folder / "model"
        self.mark = folder / "executed"
        shutil.copytree(source, self.folder)

    @property
    def code(self):
        """Python that leaves the mark."""
        return f"open({str(self.mark)!r}, 'w')"

    @property
    def pickled(self):
        """A pickle that leaves the mark when it is loaded."""
        return pickle.dumps(Executes(self.mark))

    def members(self):
        with zipfile.ZipFile(self.folder / "model.pt2") as archive:
            return {item.filename: archive.read(item) for item in archive.infolist()}

    def write(self, members, compression=zipfile.ZIP_STORED):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # names that are there twice
            with zipfile.ZipFile(self.folder / "model.pt2", "w", compression) as archive:
                for name, data in members:
                    archive.writestr(zipfile.ZipInfo(name), data, compression)
        self.sign()

    def add(self, **more):
        """Adds members, or replaces them."""
        members = self.members()
        for name, data in more.items():
            members[f"archive/{name}"] = data
        self.write(members.items())

    def change(self, name, edit):
        """Changes the JSON of a member in place."""
        content = json.loads(self.members()[f"archive/{name}"])
        edit(content)
        self.add(**{name: json.dumps(content)})

    def program(self, edit):
        """Changes the JSON of the exported program."""
        self.change(MODEL, edit)

    def graph(self, edit):
        self.program(lambda program: edit(program["graph_module"]["graph"]))

    def describe(self, **more):
        """Sets fields of model.json."""
        file = self.folder / "model.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))

    def sign(self):
        """Writes the hashes that the files have now, as somebody would who changed them."""
        described = json.loads((self.folder / "model.json").read_text())
        for name in described["files"]:
            described["files"][name] = sha256_of(self.folder / name)
        (self.folder / "model.json").write_text(json.dumps(described))


def sized(its, text):
    """Replaces the first expression of a size."""

    def edit(graph):
        for value in graph["tensor_values"].values():
            for size in value["sizes"]:
                if "as_expr" in size:
                    size["as_expr"]["expr_str"] = text
                    return

    its.graph(edit)


def ranged(its, symbol):
    its.program(lambda p: p.update(range_constraints={symbol: {"min_val": 1, "max_val": 9}}))


def called(its, **more):
    its.graph(lambda graph: graph["nodes"][-1].update(more))


def given(its, argument):
    its.graph(lambda graph: graph["nodes"][-1]["inputs"][0].update(arg=argument))


def renamed(its, name):
    """Gives the input another name, everywhere."""
    text = its.members()[f"archive/{MODEL}"].decode()
    text = text.replace('"name": "images"', f'"name": {json.dumps(name)}')
    its.add(**{MODEL: text.replace('"images": {', f"{json.dumps(name)}: {{")})


def payload(its, member, **more):
    its.change(member, lambda config: next(iter(config["config"].values())).update(more))


def nested(its, tree):
    def edit(program):
        program["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps(tree)

    its.program(edit)


def metadata(its):
    node = {"stack_trace": its.code, "custom": "{}", "source_fn_stack": f"a,{its.code}"}
    its.graph(lambda graph: [each.update(metadata=node) for each in graph["nodes"]])


def flipped(its, where, sign=True):
    data = bytearray((its.folder / "model.pt2").read_bytes())
    data[where(data)] ^= 1
    (its.folder / "model.pt2").write_bytes(data)
    if sign:
        its.sign()


def twice(its):
    harmful = its.members()[f"archive/{MODEL}"].replace(b'"images"', b'"i\\nimport os"')
    its.write([*its.members().items(), (f"archive/{MODEL}", harmful)])


def legacy(its):
    """The older form, which torch.export.load still reads, by a pickle."""
    names = ("serialized_exported_program.json", "serialized_state_dict.pt", "version")
    its.write([(name, its.pickled) for name in names])


def graph_of(its, change=lambda model: None):
    """A folder with model.onnx instead, changed."""
    weight = numpy_helper.from_array(np.ones(1, np.float32), "w")
    nodes = [
        helper.make_node("Cast", ["images"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["f"], ["m"], axes=[2, 3], keepdims=0),
        helper.make_node("Mul", ["m", "w"], ["s"]),
        helper.make_node("Softmax", ["s"], ["out"], axis=1),
    ]
    takes = helper.make_tensor_value_info("images", TensorProto.UINT8, ["b", 3, SIDE, SIDE])
    gives = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["b", 3])
    graph = helper.make_graph(nodes, "g", [takes], [gives], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    change(model)
    (its.folder / "model.onnx").write_bytes(model.SerializeToString())
    described = json.loads((its.folder / "model.json").read_text())
    described["files"] = {"model.onnx": ""}
    (its.folder / "model.json").write_text(json.dumps(described))
    its.sign()


def external(model):
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    entry = weight.external_data.add()
    entry.key = "location"
    entry.value = "../../../../../etc/passwd"


def inner_external(model):
    """In the graph of a branch, where a reader may not look."""
    graph = onnx.GraphProto()
    graph.CopyFrom(model.graph)
    onnx_model = onnx.ModelProto(graph=graph)
    external(onnx_model)
    branch = onnx_model.graph
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    model.graph.node.append(node)


EVIL_TREE = [1, {"type": "os.system", "context": "x", "children_spec": []}]
HUGE = {"sizes": [{"as_int": 2**40}], "strides": [{"as_int": 1}]}
LINK = "leads out of the folder"
# What is changed -> the change, and a part of the message.
CHANGES = {
    # expressions
    "an expression": (lambda its: sized(its, its.code), "expression of sizes"),
    "a class of python": (
        lambda its: sized(its, f"Integer.__class__.__base__({its.code})"),
        "expression",
    ),
    "a symbol's name": (lambda its: sized(its, f"Symbol({its.code}.name)"), "expression"),
    "an assumption": (lambda its: sized(its, f"Symbol('s1', integer={its.code})"), "expression"),
    "a lambda": (lambda its: sized(its, f"(lambda: {its.code})()"), "expression of sizes"),
    "a default of sympy": (lambda its: sized(its, "lambdify(s1, s1)"), "expression of sizes"),
    "a comprehension": (lambda its: sized(its, f"Add(*[{its.code}])"), "expression of sizes"),
    "a huge power": (lambda its: sized(its, "9**9**9**9"), "expression of sizes"),
    "a deep one": (lambda its: sized(its, "(" * 900 + "1" + ")" * 900), "expression of sizes"),
    "a range of code": (lambda its: ranged(its, its.code), "is not a symbol"),
    "a huge symbol": (lambda its: ranged(its, "u99999999999"), "is not a symbol"),
    # names
    "the input's name": (lambda its: renamed(its, f"x={its.code}"), "is not a name"),
    "lines in a name": (lambda its: called(its, name=f"a\n    {its.code}\n    b"), "is not a name"),
    "a name of python": (lambda its: renamed(its, "__class__"), "is not a name"),
    "a function of torch": (lambda its: called(its, target="torch.hub.load"), "not an operator"),
    "a file's operator": (
        lambda its: called(its, target="torch.ops.aten.from_file.default"),
        "not an operator",
    ),
    "an extension": (lambda its: called(its, target="#evil:op"), "not an operator"),
    "a higher operator": (
        lambda its: called(its, target="torch.ops.higher_order.cond"),
        "not an operator",
    ),
    "an operator as argument": (
        lambda its: given(its, {"as_operator": "torch.hub.load"}),
        "kind of value",
    ),
    "an inner graph": (lambda its: given(its, {"as_graph": {"name": "g"}}), "kind of value"),
    "guards": (lambda its: its.program(lambda p: p.update(guards_code=[its.code])), "guards_code"),
    "a type of arguments": (lambda its: nested(its, EVIL_TREE), "type: 'os.system' is not"),
    "a dialect": (lambda its: its.program(lambda p: p.update(verifiers=["EDGE"])), "verifiers"),
    "a key": (lambda its: its.program(lambda p: p.update(plugins=["evil"])), "is not a key"),
    "a device": (
        lambda its: given(its, {"as_device": {"type": "cuda", "index": 0}}),
        "is not 'cpu'",
    ),
    # objects
    "an object": (
        lambda its: its.graph(lambda g: g.update(custom_obj_values={"o": {"class_fqn": "os"}})),
        "custom_obj_values",
    ),
    "a pickled weight": (lambda its: payload(its, WEIGHTS, use_pickle=True), "use_pickle"),
    "a pickled constant": (
        lambda its: (
            its.add(**{"data/constants/opaque_obj_0": its.pickled}),
            payload(its, CONSTANTS, path_name="opaque_obj_0"),
        ),
        "distdl does not write",
    ),
    "a script object": (
        lambda its: payload(its, CONSTANTS, path_name="custom_obj_0"),
        "not a file of raw numbers",
    ),
    "example inputs": (
        lambda its: its.add(**{"data/sample_inputs/model.pt": its.pickled}),
        "not what distdl writes",
    ),
    "older weights": (lambda its: its.add(**{"data/weights/model.pt": its.pickled}), "not write"),
    "an older archive": (legacy, "distdl does not write"),
    # members
    "a library": (lambda its: its.add(**{"data/aotinductor/model/a.so": "ELF"}), "does not write"),
    "an extra file": (lambda its: its.add(**{"extra/x": "x"}), "distdl does not write"),
    "a file outside": (lambda its: its.add(**{"../../../x": "x"}), "distdl does not write"),
    "a member twice": (twice, "twice"),
    "a second model": (lambda its: its.add(**{"models/b.json": "{}"}), "distdl does not write"),
    "a compressed one": (
        lambda its: its.write(its.members().items(), zipfile.ZIP_DEFLATED),
        "compressed",
    ),
    "a weight too many": (lambda its: its.add(**{"data/weights/weight_77": b"x"}), "no weight"),
    "a weight of nothing": (
        lambda its: (
            its.add(**{"data/weights/weight_0": b""}),
            payload(
                its,
                WEIGHTS,
                tensor_meta={
                    **json.loads(its.members()[f"archive/{WEIGHTS}"])["config"]["layer.weight"][
                        "tensor_meta"
                    ],
                    **HUGE,
                },
            ),
        ),
        "larger than its file",
    ),
    # bytes
    "a flipped byte": (
        lambda its: flipped(its, lambda data: len(data) // 2, sign=False),
        "model.pt2 is missing or damaged",
    ),
    "a flipped byte, signed": (
        lambda its: flipped(its, lambda data: data.index(b"graph_module") + 30),
        "damaged",
    ),
    "a flipped directory": (
        lambda its: flipped(its, lambda data: data.rindex(b"PK\x01\x02")),
        "model.pt2",
    ),
    "half of it": (
        lambda its: (os.truncate(its.folder / "model.pt2", 3000), its.sign()),
        "is not an archive",
    ),
    # lies in model.json
    "a file elsewhere": (
        lambda its: its.describe(files={"../../../../etc/passwd": "0" * 64}),
        LINK,
    ),
    "an absolute file": (lambda its: its.describe(files={"/etc/passwd": "0" * 64}), "name of a"),
    "a link": (
        lambda its: (
            (its.folder / "model.pt2").unlink(),
            (its.folder / "model.pt2").symlink_to("/etc/passwd"),
        ),
        LINK,
    ),
    "a pipe": (
        lambda its: (
            (its.folder / "model.pt2").unlink(),
            os.mkfifo(its.folder / "model.pt2"),
        ),
        "is not a file",
    ),
    "no model": (lambda its: its.describe(files={}), "names 0 models"),
    "fewer classes": (lambda its: its.describe(classes=["a", "b"]), "2 classes"),
    "no classes": (lambda its: its.describe(classes=[]), "0 classes"),
    "classes of another type": (lambda its: its.describe(classes={"a": 1}), "is not a list"),
    "a huge image": (lambda its: its.describe(image_size=10**9, short_side=10**9), "image_size"),
    "another image": (lambda its: its.describe(image_size=16), "? x 3 x 16 x 16"),
    "a size as text": (lambda its: its.describe(short_side="36"), "short_side"),
    "a list": (lambda its: (its.folder / "model.json").write_text("[1]"), "is not a mapping"),
    "no JSON": (lambda its: (its.folder / "model.json").write_text("{" * 99), "is not JSON"),
    "deep JSON": (
        lambda its: (its.folder / "model.json").write_text("[" * 10**5),
        "is not JSON",
    ),
    "a description elsewhere": (
        lambda its: (
            (its.folder / "model.json").rename(its.folder.parent / "model.json"),
            (its.folder / "model.json").symlink_to("../model.json"),
        ),
        LINK,
    ),
    # model.onnx
    "weights elsewhere": (lambda its: graph_of(its, external), "weights in another file"),
    "the same in a branch": (lambda its: graph_of(its, inner_external), "in another file"),
    "operators of others": (
        lambda its: graph_of(its, lambda m: setattr(m.graph.node[0], "domain", "evil.ops")),
        "are not ONNX's own",
    ),
    "half a graph": (
        lambda its: (graph_of(its), os.truncate(its.folder / "model.onnx", 99), its.sign()),
        "model.onnx is damaged",
    ),
    "fewer classes of a graph": (
        lambda its: (graph_of(its), its.describe(classes=["a"])),
        "and model.json says ? x 1 and 1 classes",
    ),
}
# What is not read, or not ours to run, is harmless.
HARMLESS = {
    "nothing": lambda its: None,
    "what debuggers read": metadata,
    "the folder's own code": lambda its: (
        [
            (its.folder / "distdl_scoring" / f).write_text(its.code)
            for f in ("scorer.py", "crop.py")
        ],
        [(its.folder / f).write_text(its.code) for f in ("sitecustomize.py", "torch.py")],
        its.sign(),
    ),
    "a graph": graph_of,
}


@pytest.mark.parametrize("name", CHANGES)
def test_it_is_refused_in_one_message_and_executes_nothing(name, exported, tmp_path):
    change, message = CHANGES[name]
    its = Foreign(exported, tmp_path)
    change(its)
    with pytest.raises(ValueError, match="cannot be read; export it again: ") as error:
        Scorer(its.folder)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert str(error.value).isprintable()
    assert not its.mark.exists()


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_harmless_loads_and_executes_nothing_either(name, exported, tmp_path):
    HARMLESS[name](its := Foreign(exported, tmp_path))
    (answer,) = Scorer(its.folder).score([photo("red")], top_k=3)
    assert {each["class"] for each in answer["top"]} == {*CLASSES}
    assert not its.mark.exists()


@pytest.mark.parametrize("name", [*CHANGES] if MATRIX else ["an expression"])
def test_serve_refuses_it(name, exported, tmp_path):
    change, message = CHANGES[name]
    its = Foreign(exported, tmp_path)
    change(its)
    done = distdl("serve", str(its.folder), "serve.port=0", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("distdl: 1 problem, nothing was started\n")
    assert message in done.stderr
    assert not its.mark.exists()


WRITTEN = (
    "Symbol('s77', positive=True, integer=True)",
    "Mul(Integer(-4), Symbol('s77', positive=True, integer=True))",
    "Min(Integer(768), Mul(Integer(768), Symbol('s77', positive=True, integer=True)))",
    "FloorDiv(Add(Symbol('u0', integer=True), Integer(1)), Integer(2))",
    "Equality(Mod(s77, Integer(4)), Integer(0))",
    "s77*4 + 1",
)


def test_sizes_are_expressions_of_numbers_and_symbols():
    for text in WRITTEN:
        assert expression(text, "here") == text
    for text in (
        "s",
        "open",
        "s1.x",
        "s1[0]",
        "'s1'",
        "s1 if s1 else s1",
        "True",
        "1.5",
        "Symbol(s1)",
    ):
        with pytest.raises(Unsafe, match=r"here: .* is not an expression of sizes"):
            expression(text, "here")


def test_weights_are_what_was_written(exported):
    """The archive that torch gets is a new one."""
    with zipfile.ZipFile(exported / "model.pt2") as archive:
        data = {item.filename for item in archive.infolist()}
    scorer = Scorer(exported)
    pixels = torch.randint(0, 256, (5, 3, SIDE, SIDE), dtype=torch.uint8)
    direct = torch.export.load(io.BytesIO((exported / "model.pt2").read_bytes())).module()
    with torch.inference_mode():
        assert np.array_equal(scorer.found([*pixels]), direct(pixels).numpy())
    assert any("weight_0" in name for name in data)
    assert any("tensor_0" in name for name in data)
