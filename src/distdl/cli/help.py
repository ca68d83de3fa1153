"""`--help`: the groups, their options with one line each, and examples; or, with `launcher=slurm`,
each setting of that launcher. Imports no torch."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from distdl.config import compose, groups, user_conf
from distdl.job import blamed
from distdl.util.screen import escaped

HEAD = """\
distdl trains with PyTorch Lightning here, on a cluster, or on Azure: the same run anywhere.

usage: python -m distdl [key=value | group=option] ...
       python -m distdl COMMAND ...
"""

EXAMPLES = """examples:
  python -m distdl experiment=resnet50_ddp debug=cpu           the main job, on a laptop
  python -m distdl experiment=resnet50_ddp                     ... on all GPUs of this machine
  python -m distdl model=resnet101 optimizer.lr=0.2 data.batch_size=64 trainer.max_epochs=3
  python -m distdl experiment=resnet50_imagenet data.root=/path/to/imagenet dry_run=true
  python -m distdl -m optimizer.lr=0.05,0.1 seed=0,1 ...       each combination as a run
  torchrun --nproc-per-node 2 -m distdl ...                    ranks that somebody else starts
  python -m distdl launcher=slurm --help                       each setting of a launcher

flags:
  -m, --multirun            run every combination of comma-separated values
  --json                    answer a program: JSON on stdout (of every command)
  --cfg job                 print the composed config (also with -m) and stop
  --resolve, -p PACKAGE     with --cfg: resolve interpolations; print only a part
  -cd, --config-dir DIR     a folder with more options; those of ./conf may replace distdl's
  --info, --hydra-help      Hydra's own

A run with a name=... can be started again; dry_run=true prints what would run.
"""


def text(commands: Mapping[str, tuple[str, str]]) -> str:
    lines = [HEAD, "commands:"]
    lines += [f"  {name:<12} {about}" for name, (_, about) in commands.items()]
    lines += ["", "groups and their options (* by default):"]
    defaults = groups.defaults()
    for group, options in sorted(_groups().items()):
        lines.append(f"  {group}")
        for option, about in sorted(options.items()):
            mark = "*" if option in defaults.get(group, ()) else " "
            lines.append(f"   {mark} {option:<20} {about}")
    lines += ["", EXAMPLES]
    return "\n".join(lines)


def of_launcher(overrides: Sequence[str], config_dirs: Sequence[str]) -> str:
    """Each setting of the launcher that the overrides choose: its value here, and what it does."""
    from distdl.launch import launch

    config = compose.compose(overrides, config_dirs)
    written = OmegaConf.to_container(config.launcher, resolve=False)
    assert isinstance(written, dict)
    node = {str(key): value for key, value in written.items()}
    _, _, kind = launch.code_of(config)
    launcher = launch.adapted(kind)
    about: Mapping[str, str] = {}
    if launcher:
        with blamed(launcher, "about_settings"):
            about = launcher.about_settings()
    option = [word for word in overrides if word.startswith("launcher=")][-1]
    first = _groups().get("launcher", {}).get(option.removeprefix("launcher="), "")
    parts = [f"{option}: {first}" if first else option, ""]
    if not launcher:
        parts += [f"{node['_target_']} is not allowed, or not installed, and explains nothing:", ""]
    width = max(shutil.get_terminal_size().columns, 40)
    indented = textwrap.TextWrapper(width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    for key, value in node.items():
        if not key.startswith("_"):
            parts.append(f"  launcher.{key}={flow(value)}")
            parts += map(indented.fill, about.get(key, "").splitlines())
            inner = [path for path in about if path.startswith(f"{key}.")]
            parts += [indented.fill(f"{path}: {' '.join(about[path].split())}") for path in inner]
    return escaped("\n".join(parts))


def flow(value: object) -> str:
    """A value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, sort_keys=False)
    return text.removesuffix("...\n").strip()


def _groups() -> dict[str, dict[str, str]]:
    """group -> option -> its first comment: distdl's options, then the user's."""
    groups: dict[str, dict[str, str]] = {}
    conf = user_conf.folder()
    for root in (Path(str(files("distdl.conf"))), *([conf] if conf else [])):
        for file in root.glob("[!_.]*/*.yaml"):
            groups.setdefault(file.parent.name, {})[file.stem] = _about(file)
    return groups


def _about(file: Path) -> str:
    for line in file.read_bytes().decode("utf-8", "replace").splitlines():
        if line.startswith("#") and "@package" not in line:
            return line.lstrip("# ").strip()
        if line and not line.startswith("#"):
            break
    return ""
