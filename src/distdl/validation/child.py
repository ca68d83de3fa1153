"""Stage 2 of validation: imports every `_target_` of a config and binds its arguments.

Run as a child process (`python -m distdl.validation.child`): the request is JSON on stdin, the
answer JSON on stdout. Importing takes seconds, runs the user's code and may print, crash or hang;
the command line itself must not.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import json
import os
import pkgutil
import pydoc
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any, TypeGuard

from distdl.config.hints import lightning_1
from distdl.config.own_code import editable, is_installed, make_importable
from distdl.config.paths import path_text
from distdl.config.schema import COLLECTIONS, COMPONENTS
from distdl.job import adapted_launcher, is_launcher
from distdl.util import lightning_names
from distdl.util.errors import Problem
from distdl.util.extras import install
from distdl.util.imports import no_exit
from distdl.util.redact import hide_shapes
from distdl.util.shadowing import shadowing
from distdl.util.suggest import closest
from distdl.util.typed import Path
from distdl.validation import kinds, logged, own_tasks
from distdl.validation.meta import MODEL_KEYS
from distdl.validation.resolve import Resolved
from distdl.validation.targets import BUILT, Trust, nodes, target_problems

_SPECIAL = ("_target_", "_partial_", "_recursive_", "_convert_", "_args_")
OURS = ("distdl/validation/child.py", "distdl/util/imports.py")
HOOK = "check"  # the method by which a target checks its own node
# Classes with such a method for a node whatever its target is, in packages above this one.
OF_NODES: dict[Path, tuple[str, ...]] = {
    ("model",): ("distdl.models.recompute.Check", "distdl.models.lora.LoraCheck"),
    ("optimizer",): ("distdl.optim.trial.OneStep",),
    ("schedule",): ("distdl.optim.trial.ByClock",),
}
UNKNOWN = "takes no argument"
# Functions that pass **kwargs to a model: only building the model shows which are valid.
_BUILT_ON_META = (
    "torchvision.models.",
    "timm.models.",
    "timm.create_model",
    "distdl.models.torchvision_detector",
)

# What the builder (worker.build) passes besides the node's own keys. `supplied`: the leading
# positional arguments; `consumed`: keys that are not passed to the target; `null_is_absent`: keys
# that are passed only if they are set; `offered`: arguments passed if the signature takes them.
SUPPLIED: dict[str, dict[str, tuple[str, ...]]] = {
    "optimizer": {
        "supplied": ("params",),
        "consumed": (
            "lr_scaling",
            "lr_reference_batch",
            "decay_norm_and_bias",
            "layer_decay",
            "backbone_lr",
        ),
        "null_is_absent": ("fused",),
    },
    "model": {"consumed": MODEL_KEYS},
    "schedule": {
        "supplied": ("optimizer",),
        "consumed": ("interval",),
        "offered": ("steps_per_epoch", "max_epochs", "total_steps", "budget"),
    },
    "task": {"supplied": ("context",)},  # to a function; a class is made of the node's own keys
}


class Binding:
    """One validation, which collects problems, notes and facts."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.config: dict[str, Any] = request["config"]
        self.context: dict[str, Any] = request["context"]
        self.local: bool = self.context["local"]
        self.trust = Trust(*map(tuple, request["trust"]))
        self.skip = [path[:-1] for path, _ in target_problems(self.config, self.trust)]
        self.called: dict[Path, Callable[..., Any]] = {}
        self.expressions = {tuple(path): text for path, text in request["expressions"]}
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.before = {*sys.modules}
        self.facts: dict[str, Any] = {"model_configures_optimizers": None}

    @no_exit()
    def run(self) -> None:
        self.import_targets()
        self.compare_domains()
        for key in (*COMPONENTS, *COLLECTIONS):
            self.visit(self.config.get(key), (key,))
        self.facts["metrics"] = logged.metrics_of(self.called.get(("model",)))
        if isinstance(self.config.get("trainer"), dict):
            from distdl.validation import lightnings

            lightnings.trainer(self, self.config["trainer"])
        if not self.local:
            self.check_imported_modules()
            self.facts["imported"] = sorted(self.imported_files())
        self.problems = [each for each in self.problems if not self.follows(each.path, each.what)]

    def follows(self, path: str, what: str) -> bool:
        """Whether a value is wrong only because it refers to a wrong value that is reported."""
        refers = {path_text(path): text[2:-1] for path, text in self.expressions.items()}
        built = [p for p in refers if p.startswith(f"{path}.") and "cannot be built" in what]
        for origin in (path, *built):
            while origin in refers:
                origin = refers[origin]
            if origin != path and origin in (problem.path for problem in self.problems):
                return True
        return False

    def import_targets(self) -> None:
        """Imports every target and checks its kind, before any model is built for a check."""
        for path, node in nodes({key: self.config.get(key) for key in BUILT}):
            if path not in self.skip:
                called = self.locate(node["_target_"], path)
                if called is not None and self.accepted(called, node, path):
                    self.called[path] = called
                else:
                    self.skip.append(path)

    def compare_domains(self) -> None:
        """Data and model that name a domain must name the same one. If they do not, nothing else
        about the two is worth a message."""
        parts = [self.called.get((section,)) for section in ("data", "model")]
        named = [getattr(getattr(part, "domain", None), "name", None) for part in parts]
        given, learnt = named
        if not (isinstance(given, str) and isinstance(learnt, str)) or given == learnt:
            return
        data, model = (getattr(part, "__name__", "") for part in parts)
        what = f"{data} gives samples of {given}, and {model} learns {learnt}"
        remedy = "choose data and model of one domain: data=NAME or model=NAME"
        self.add(("data",), what, remedy, code="mismatch")
        self.skip += [("data",), ("model",)]

    def check_imported_modules(self) -> None:
        """Notes modules from outside the project and outside the installed packages: the nodes may
        have them. Modules that only $PYTHONPATH finds are refused: a job has its own
        $PYTHONPATH."""
        searched = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        launcher = self.config.get("launcher") or {}
        if launcher.get("modules") or "PYTHONPATH" in str(launcher):
            searched = []  # the user sets up modules or $PYTHONPATH of the nodes
        installed = [folder for _, folder in editable()]
        launches = str(launcher.get("_target_")).partition(".")[0]  # runs here, not on the nodes
        new = {*sys.modules} - self.before - {launches}
        # Top-level modules only: those below torch.classes claim to have any attribute.
        for name in sorted(n for n in new if n.isidentifier() and not n.startswith("__")):
            module = sys.modules[name]
            files = [*getattr(module, "__path__", ()), getattr(module, "__file__", None)]
            home = FilePath(str(files[0] or ".")).parent
            known = str(home) in self.trust.folders or is_installed(home)
            if known or not home.is_absolute():
                continue
            what = f"{name} is imported from {home}, which no job takes along"
            remedy = "or choose a project.root that contains it"
            if str(home) in searched and not any(home.is_relative_to(f) for f in installed):
                what += ", and no node finds it: nodes have another PYTHONPATH"
                remedy = f"pip install it, here and there; {remedy}"
                self.add(("project", "root"), what, remedy, code="incomplete")
            else:
                self.notes.append(f"{what}: install it on the nodes, {remedy}")

    def imported_files(self) -> Iterator[str]:
        """Files of the user's modules, which the nodes need as well."""
        for module in [*sys.modules.values()]:
            file = vars(module).get("__file__")  # some modules claim to have any attribute
            if isinstance(file, str) and FilePath(file).is_absolute():
                own = any(FilePath(file).is_relative_to(f) for f in self.trust.folders)
                if own and not is_installed(FilePath(file)):
                    yield file

    def visit(self, value: object, path: Path) -> None:
        """Checks a node and the nodes inside it. Nodes below `_recursive_: false` are not bound:
        the target builds them itself, and may pass further arguments."""
        from distdl.validation import lightnings

        unbuilt: list[Path] = []
        for inner, node in nodes(value):
            built = not any(inner[: len(above)] == above for above in unbuilt)
            if node.get("_recursive_", True) is False:
                unbuilt.append(inner)
            location = (*path, *inner)
            if location in self.skip:
                continue
            called = self.called[location]
            lightnings.component(self, called, location)
            before = len(self.problems)
            if built:
                self.bind(called, node, location)
            # A hook may rely on values that are known to be wrong; only unknown keys do no harm.
            if built and all(UNKNOWN in problem.what for problem in self.problems[before:]):
                self.hook(called, node, location)
                for name in OF_NODES.get(location, ()):
                    ours: Any = pydoc.locate(name)
                    self.hook(ours, node, location)

    def add(self, path: Path, what: str, remedy: str = "", *, code: str) -> None:
        self.problems.append(Problem(path_text(path), what, remedy, code=code))

    def locate(self, target: str, path: Path) -> object:
        """Imports what a dotted path names; None (and a problem or a note) if that fails."""
        path = (*path, "_target_")
        package = target.partition(".")[0]
        if is_absent(package):
            self.absent(package, path)
            return None
        typed = sys.argv
        try:
            sys.argv = [target]  # a parser that runs at import prints this name
            return kinds.locate(target)
        except kinds.NoSuchName as error:
            modules = [m.name for m in pkgutil.iter_modules(getattr(error.owner, "__path__", ()))]
            public = [name for name in vars(error.owner) if not name.startswith("_")]
            near = closest(error.missing, [*modules, *public])
            remedy = f"did you mean {error.reached}.{near}?" if near else ""
            self.add(path, str(error), remedy, code="incomplete")
        except (Exception, SystemExit) as error:
            if shadowing(error, self.trust.folders):
                raise  # all further imports would fail in the same way
            package = str(getattr(error, "name", None)).partition(".")[0]
            if isinstance(error, ModuleNotFoundError) and is_absent(package):
                self.absent(package, path)
                return None
            remedy = lightning_1.replaced(error) + origin(error)
            if isinstance(error, SystemExit):
                remedy += ': put the code of a script under if __name__ == "__main__":'
            what = f"{target} cannot be imported: {in_short(error)}"
            self.add(path, what, remedy, code="failed")
        finally:
            sys.argv = typed
        return None

    def absent(self, package: str, path: Path) -> None:
        if self.local:
            what = f"needs the package {package}, which is not installed"
            self.add(path, what, install(package), code="not-installed")
        else:
            what = f"not checked: {path_text(path)}: package {package} is not installed here"
            self.notes.append(f"{what}; to check it: {install(package)}")

    def accepted(
        self, called: object, node: dict[str, Any], path: Path
    ) -> TypeGuard[Callable[..., Any]]:
        """Whether the target can be called and is of the kind that its section accepts."""
        target = node["_target_"]
        location = (*path, "_target_")
        why: Problem | None = None
        missing = ", ".join(sorted(getattr(called, "__abstractmethods__", ())))
        if not callable(called):
            what = f"{target} is a {type(called).__name__}, not a class or function"
            why = Problem(path_text(location), what, code="wrong-kind")
        elif missing:
            what = f"{target} is abstract: it does not define {missing}"
            why = Problem(path_text(location), what, code="incomplete")
        else:
            why = kinds.problem_of_kind(called, node, path, self.trust)
        if path == ("task",) and why is None:
            why = own_tasks.problem(called, target)
        if why:
            self.problems.append(why)
        return why is None

    def bind(
        self, called: Callable[..., Any], node: dict[str, Any], path: Path, target: str = ""
    ) -> None:
        from distdl.validation.signatures import bind, takes, takes_anything

        target = target or node["_target_"]
        text = path_text(path)
        parameters = takes(called)
        if parameters is None:
            return
        table = SUPPLIED.get(text, {})
        if text == "task" and inspect.isclass(called):
            table = {}
        hidden = [*_SPECIAL, *table.get("consumed", ())]
        hidden += [key for key in table.get("null_is_absent", ()) if node.get(key) is None]
        misfits = [
            *bind(
                parameters,
                {key: value for key, value in node.items() if key not in hidden},
                positional=len(table.get("supplied", ())) + len(node.get("_args_") or ()),
                partial=node.get("_partial_") is True,
                offered=table.get("offered", ()),
            )
        ]
        unknown = [each.path for each in misfits if each.code == "unknown-key"]
        if path in (("model",), ("data",)) and len(unknown) > 3:
            misfits = [each for each in misfits if each.path not in unknown]
            default = f"if the default adds them, write under defaults: - override /{text}: null"
            what = f"{target} {UNKNOWN} {', '.join(unknown)}"
            self.add(path, what, default, code="unknown-key")
        for misfit in misfits:
            name = misfit.path
            what = misfit.what
            location = (*path, name) if name else path
            remedy = misfit.remedy.replace("{}", f"{text}.")
            if misfit.code == "unknown-key":
                what = f"{target} {UNKNOWN} {name!r}"
                near = closest(name, MODEL_KEYS) if text == "model" else ""
                if near:
                    remedy = f"did you mean {text}.{near}?"
                if is_launcher(called):
                    remedy = adapted_launcher(called).instead.get(name, remedy)
                if name == "class_path":
                    remedy = f"this key is LightningCLI's: write {text}._target_={node[name]}"
            elif misfit.code == "missing-key":
                what = f"missing, {target} needs it"
                remedy = f"write {path_text(location)}=..."
            elif "{}" in what:
                shown = Resolved(values=self.config, expressions=self.expressions).show(location)
                what = what.replace("{}", shown)
            self.add(location, what, remedy, code=misfit.code)
        called_on_meta = target.startswith(_BUILT_ON_META) and node.get("_partial_") is not True
        if called_on_meta and takes_anything(parameters):
            self.build(target, node, path)

    def build(self, target: str, node: dict[str, Any], path: Path) -> None:
        from distdl.validation.meta import misfit

        inner = (str(each["_target_"]) for _, each in nodes(node))
        foreign = any(not each.startswith(("torch.", *_BUILT_ON_META)) for each in inner)
        refused = any(path == bad[: len(path)] for bad in self.skip)
        if path[0] == "model" and not foreign and not refused and (wrong := misfit(node)):
            location = (*path, wrong.path) if wrong.path else path
            remedy = wrong.remedy.replace("{}", path_text(path))
            self.add(location, f"{target}: {wrong.what}", remedy, code=wrong.code)

    def hook(self, called: Callable[..., Any], node: dict[str, Any], path: Path) -> None:
        """Lets a target check its own node, in a static or class method `check(node[, context])`.

        It returns Problems, with paths relative to the node, and strings that say what it could
        not check. The context has the number of devices, whether the run is `local`, the `config`,
        and the `refused` components, which must not be imported: `model`, `callbacks.stop`. A data
        node's check without a context looks at files, so it is called for local runs only.
        """
        static = inspect.getattr_static(called, HOOK, None)
        is_ours = isinstance(static, (staticmethod, classmethod)) or inspect.isfunction(called)
        if static is None or not is_ours:
            return
        start = path_text(path)
        try:
            check = getattr(called, HOOK)
            wants_context = len(inspect.signature(check).parameters) > 1
            if path[0] == "data" and not self.local and not wants_context:
                return
            refused = [path_text(bad[: 1 + (bad[0] in COLLECTIONS)]) for bad in self.skip if bad]
            context = {**self.context, "config": self.config, "refused": refused}
            arguments = (node, context) if wants_context else (node,)
            for problem in check(*arguments) or ():
                if isinstance(problem, str):
                    self.notes.append(f"not checked: {start}: {problem}")
                else:
                    location = f"{start}.{problem.path}" if problem.path else start
                    self.problems.append(replace(problem, path=location))
        except Exception as error:  # a check may be the user's own code
            what = f"its own check failed: {in_short(error)}"
            self.add(path, what, origin(error), code="failed")


def is_absent(package: str) -> bool:
    return package not in sys.modules and importlib.util.find_spec(package) is None


def in_short(error: BaseException) -> str:
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def origin(error: BaseException) -> str:
    """File and line where an import or a check failed, for the user to look at."""
    if isinstance(error, SyntaxError):
        return f"see {error.filename}, line {error.lineno}"
    last = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = FilePath(frame.f_code.co_filename)
        # For an exit, argparse is the last frame, but the user's call is to blame.
        library = isinstance(error, SystemExit) and is_installed(file)
        if file.is_file() and not file.as_posix().endswith(OURS) and not library:
            last = f"see {file}, line {line}"
    return last


def check(request: dict[str, Any]) -> dict[str, Any]:
    """The problems, notes and facts that `distdl.validation.validate` reads."""
    lightning_names.serve()
    make_importable(request["trust"][0])  # instead of the folder that `python -m` adds
    binding = Binding(request)
    try:
        binding.run()
    except Exception as error:  # imports of user code may raise anything
        if (shadow := shadowing(error, binding.trust.folders)) is None:
            raise
        binding.problems = [Problem(*shadow, code="hidden-module")]
    problems = [[p.path, hide_shapes(p.what), p.remedy, p.code] for p in binding.problems]
    return {"problems": problems, "notes": binding.notes, "facts": binding.facts}


def main() -> None:
    gc.disable()  # the child lives for seconds and mostly imports
    # Libraries print: their stdout goes to stderr, so that the real stdout has the answer only.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from distdl.util.orphans import die_with_parent

    die_with_parent(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    json.dump(check(json.load(sys.stdin)), answer)
    answer.close()
    sys.stderr.flush()
    os._exit(0)  # a normal exit would take another second to unload torch and Lightning


if __name__ == "__main__":
    main()
