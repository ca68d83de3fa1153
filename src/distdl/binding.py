"""Stage 2 of validation: imports every `_target_` of a config and binds its arguments.

Run as a child process (`python -m distdl.binding`): the request is JSON on stdin, the answer JSON
on stdout. Importing takes seconds, runs the user's code and may print, crash or hang, none of which
may happen to the command line itself.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import json
import os
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

from distdl import kinds, lightning_1, lightning_names
from distdl.entry import shadowing
from distdl.importing import no_exit
from distdl.own_code import editable, is_installed, make_importable
from distdl.schema import COLLECTIONS, COMPONENTS, Path, path_text
from distdl.suggest import closest
from distdl.targets import BUILT, Trust, nodes, target_problems

_SPECIAL = ("_target_", "_partial_", "_recursive_", "_convert_", "_args_")
OURS = ("distdl/binding.py", "distdl/importing.py")
UNKNOWN = "takes no argument"
# Functions that pass **kwargs on to a model: only building it shows what they take.
_BUILT_ON_META = ("torchvision.models.", "timm.models.", "timm.create_model")


class Binding:
    """One validation; collects problems as (path, what, remedy), notes and facts."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.config: dict[str, Any] = request["config"]
        self.supplied: dict[str, dict[str, list[str]]] = request["supplied"]
        self.context: dict[str, Any] = request["context"]
        self.local: bool = self.context["local"]
        self.trust = Trust(*map(tuple, request["trust"]))
        self.skip = [path[:-1] for path, _ in target_problems(self.config, self.trust)]
        self.called: dict[Path, Any] = {}
        self.expressions = {tuple(path): text for path, text in request["expressions"]}
        self.problems: list[tuple[str, str, str]] = []
        self.notes: list[str] = []
        self.before = {*sys.modules}
        self.facts: dict[str, Any] = {"model_configures_optimizers": None}

    @no_exit()
    def run(self) -> None:
        self.look()
        for key in COMPONENTS:
            self.visit(self.config.get(key), (key,))
        for key in COLLECTIONS:
            self.visit(self.config.get(key), (key,))
        if isinstance(self.config.get("trainer"), dict):
            from distdl import lightnings

            lightnings.trainer(self, self.config["trainer"])
        if not self.local:
            self.left_behind()
        # What refers to a wrong value is wrong with it: said once, where it is written.
        refers = {path_text(path): text[2:-1] for path, text in self.expressions.items()}
        told = {place for place, *_ in self.problems}

        def origin_of(place: str) -> str:
            return origin_of(refers[place]) if place in refers else place

        def follows(place: str, what: str) -> bool:
            built = [p for p in refers if p.startswith(f"{place}.") and "cannot be built" in what]
            return any(origin_of(p) in told - {place} for p in (place, *built))

        self.problems = [each for each in self.problems if not follows(each[0], each[1])]

    def look(self) -> None:
        """Imports every target and asks for its kind, before anything is built to be looked at."""
        for path, node in nodes({key: self.config.get(key) for key in BUILT}):
            if path not in self.skip:
                found = self.locate(node["_target_"], path)
                if found is None or not self.accepted(found, node, path):
                    self.skip.append(path)
                else:
                    self.called[path] = found

    def left_behind(self) -> None:
        """What was imported from neither the project nor where packages are installed is noted:
        the nodes may have it. What only $PYTHONPATH leads to is refused: theirs is the bundle's."""
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        launcher = self.config.get("launcher") or {}
        if launcher.get("modules") or "PYTHONPATH" in str(launcher):
            given = []  # the user says what the nodes have
        installed = [folder for _, folder in editable()]
        launches = str(launcher.get("_target_")).partition(".")[0]  # here, and not there
        new = {*sys.modules} - self.before - {launches}
        for name in sorted(n for n in new if n.isidentifier()):
            module = sys.modules[name]
            places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None)]
            home = FilePath(str(places[0] or ".")).parent
            known = name.startswith("__") or str(home) in self.trust.folders
            if home.is_absolute() and not known and not is_installed(home):
                what = f"{name} is imported from {home}, which no job takes along"
                remedy = "or choose project.root above both"
                if str(home) in given and not any(home.is_relative_to(f) for f in installed):
                    what += ", and no node looks for it: PYTHONPATH is another one there"
                    self.add(("project", "root"), what, f"pip install it, here and there; {remedy}")
                else:
                    self.notes.append(f"{what}: install it there, {remedy}")

    def visit(self, value: Any, path: Path, *, built: bool = True) -> None:
        """Checks a node and those inside it.

        Args:
            built: False below `_recursive_: false`, where the target builds the inner nodes itself
                and may pass further arguments.
        """
        items = value.items() if isinstance(value, dict) else ()
        if isinstance(value, list):
            items = enumerate(value)  # type: ignore[assignment]
        inner_built = built
        if isinstance(value, dict) and "_target_" in value:
            inner_built = built and value.get("_recursive_", True) is not False
            if path not in self.skip:
                self.node(value, path, built)
        for key, item in items:
            self.visit(item, (*path, key), built=inner_built)

    def node(self, node: dict[str, Any], path: Path, built: bool) -> None:
        called = self.called[path]
        from distdl import lightnings

        lightnings.component(self, called, path)
        if built:
            before = len(self.problems)
            self.bind(called, node, path)
            # A hook may rely on values that are known to be wrong; a key too many harms none.
            wrong = [what for _, what, _ in self.problems[before:] if UNKNOWN not in what]
            if not wrong:
                self.hook(called, node, path)

    def add(self, path: Path, what: str, remedy: str = "") -> None:
        self.problems.append((path_text(path), what, remedy))

    def locate(self, target: str, path: Path) -> Any:
        """Imports what a dotted path names; None (and a problem or a note) if it cannot be."""
        place = (*path, "_target_")
        package = target.partition(".")[0]
        if is_absent(package):
            return self.absent(package, place)
        typed = sys.argv
        try:
            sys.argv = [target]  # what parses it when it is imported speaks by that name
            return kinds.locate(target)
        except kinds.NoSuchName as error:
            modules = (m.name for m in pkgutil.iter_modules(getattr(error.found, "__path__", ())))
            near = closest(
                error.missing, [*modules, *(n for n in vars(error.found) if n[0] != "_")]
            )
            remedy = f"did you mean {error.reached}.{near}?" if near else ""
            self.add(place, str(error), remedy)
            return None
        except (Exception, SystemExit) as error:
            if shadowing(error, self.trust.folders):
                raise  # and so will all that follow
            package = str(getattr(error, "name", None)).partition(".")[0]
            if isinstance(error, ModuleNotFoundError) and is_absent(package):
                return self.absent(package, place)
            remedy = lightning_1.replaced(error) + origin(error)
            if isinstance(error, SystemExit):
                remedy += ': put what only a script does under if __name__ == "__main__":'
            self.add(place, f"{target} cannot be imported: {said(error)}", remedy)
            return None
        finally:
            sys.argv = typed

    def absent(self, package: str, place: Path) -> None:
        if self.local:
            what = f"needs the package {package}, which is not installed"
            self.add(place, what, "install it into this environment")
        else:
            note = f"not checked: {path_text(place)}: package {package} is not installed here"
            self.notes.append(note)

    def accepted(self, found: Any, node: dict[str, Any], path: Path) -> bool:
        """Whether it can be called, and is of the kind that its section takes."""
        target = node["_target_"]
        if not callable(found):
            what = f"{target} is a {type(found).__name__}, no class or function"
            self.add((*path, "_target_"), what)
            return False
        if lacking := ", ".join(sorted(getattr(found, "__abstractmethods__", ()))):
            self.add((*path, "_target_"), f"{target} is abstract: it does not define {lacking}")
            return False
        refused = kinds.problem_of_kind(found, node, path, self.trust)
        if refused:
            self.add((*path, "_target_"), *refused)
        return refused is None

    def bind(self, called: Any, node: dict[str, Any], path: Path, target: str = "") -> None:
        from distdl.signatures import bind, takes

        target = target or node["_target_"]
        table = self.supplied.get(str(path[0]), {}) if len(path) == 1 else {}
        hidden = (*_SPECIAL, *table.get("consumed", ()))
        unset = [key for key in table.get("null_is_absent", ()) if node.get(key) is None]
        given = {k: v for k, v in node.items() if k not in hidden and k not in unset}
        signature = takes(called)
        if signature is None:
            return
        positional = len(table.get("supplied", ())) + len(node.get("_args_") or ())
        partial = node.get("_partial_") is True
        offered = table.get("offered", ())
        found = list(
            bind(signature, given, positional=positional, partial=partial, offered=offered)
        )
        unknown = [name for name, what, _ in found if what == "unknown argument"]
        if path in (("model",), ("data",)) and len(unknown) > 3:
            found = [each for each in found if each[0] not in unknown]
            remedy = (
                f"those of the default? under defaults in your file: - override /{path[0]}: null"
            )
            self.add(path, f"{target} {UNKNOWN} {', '.join(unknown)}", remedy)
        for name, what, remedy in found:
            place = (*path, name) if name else path
            if what == "unknown argument":
                what = f"{target} {UNKNOWN} {name!r}"
                remedy = remedy.replace("{}", f"{path_text(path)}.")
                if name == "class_path":
                    remedy = f"LightningCLI's word: {path_text(path)}._target_={node[name]}"
            elif what == "missing argument":
                what, remedy = f"missing, {target} needs it", f"write {path_text(place)}=..."
            elif "{}" in what:
                what = what.replace("{}", self.show(place))
                remedy = remedy.replace("{}", f"{path_text(path)}.")
            self.add(place, what, remedy)
        if signature.any_keyword and not partial and target.startswith(_BUILT_ON_META):
            self.build(target, node, path)

    def build(self, target: str, node: dict[str, Any], path: Path) -> None:
        from distdl.meta import misfit

        inner = [t for t in targets(node) if not t.startswith(("torch.", *_BUILT_ON_META))]
        if path[0] != "model" or inner or any(path == bad[: len(path)] for bad in self.skip):
            return
        found = misfit(node)
        if found is not None:
            name, what, remedy = found
            place = (*path, name) if name else path
            self.add(place, f"{target}: {what}", remedy.replace("{}", path_text(path)))

    def hook(self, called: Any, node: dict[str, Any], path: Path) -> None:
        """Lets a target check its own node: a static or class method `check(node[, context])`.

        It returns Problems, whose paths are relative to the node, and strings: what it could not
        check. The context says how many devices there are, whether the run is `local`, the whole
        `config`, and which components are `refused` and must not be imported; a check of a data
        node that does not ask for it looks at files, which only a local run finds here.
        """
        static = inspect.getattr_static(called, "check", None)
        is_ours = isinstance(static, (staticmethod, classmethod)) or inspect.isfunction(called)
        if static is None or not is_ours:
            return
        check = called.check
        try:
            wants_context = len(inspect.signature(check).parameters) > 1
            if path[0] == "data" and not self.local and not wants_context:
                return
            refused = [place[0] for place in self.skip if place]
            context = {**self.context, "config": self.config, "refused": refused}
            problems = check(node, context) if wants_context else check(node)
            for problem in problems or ():
                start = path_text(path)
                if isinstance(problem, str):
                    self.notes.append(f"not checked: {start}: {problem}")
                    continue
                place = f"{start}.{problem.path}" if problem.path else start
                self.problems.append((place, problem.what, problem.remedy))
        except Exception as error:
            self.add(path, f"its own check failed: {said(error)}", origin(error))

    def show(self, path: Path) -> str:
        from distdl.resolve import Resolved

        return Resolved(values=self.config, expressions=self.expressions).show(path)


def is_absent(package: str) -> bool:
    return package not in sys.modules and importlib.util.find_spec(package) is None


def targets(value: Any) -> Iterator[str]:
    for _, node in nodes(value):
        yield str(node["_target_"])


def said(error: BaseException) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def origin(error: BaseException) -> str:
    """File and line where an import or a check failed, for the user to look at."""
    if isinstance(error, SyntaxError):
        return f"see {error.filename}, line {error.lineno}"
    trace, place, leaves = error.__traceback__, "", isinstance(error, SystemExit)
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        ours = FilePath(name).as_posix().endswith(OURS)
        # What ends Python is argparse's, and who asked for that the user's.
        if FilePath(name).is_file() and not ours and not (leaves and is_installed(FilePath(name))):
            place = f"see {name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return place


def answered(request: dict[str, Any]) -> dict[str, Any]:
    """Problems, notes and facts, as `distdl.validate` reads them."""
    lightning_names.serve()
    make_importable(request["trust"][0])  # and not what `python -m` puts there
    binding = Binding(request)
    try:
        binding.run()
    except Exception as error:
        if (found := shadowing(error, binding.trust.folders)) is None:
            raise
        binding.problems = [found]
    from distdl.redact import hide_shapes

    problems = [[path, hide_shapes(what), remedy] for path, what, remedy in binding.problems]
    return {"problems": problems, "notes": binding.notes, "facts": binding.facts}


def main() -> None:
    gc.disable()  # a child that lives for seconds, most of which are imports
    # Libraries print: their stdout goes to stderr, and the answer keeps the real one to itself.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from distdl.orphans import die_with_parent

    die_with_parent(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    json.dump(answered(json.load(sys.stdin)), answer)
    answer.close()
    sys.stderr.flush()
    os._exit(0)  # taking torch and Lightning apart again takes another second


if __name__ == "__main__":
    main()
