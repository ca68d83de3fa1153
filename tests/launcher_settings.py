"""The tables of launchers' settings: `python -m tests.launcher_settings --write` puts them into the
documents, and tests/unit/cli/test_help.py compares the two."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from distdl.cli.help import flow
from distdl.validation.kinds import locate

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "azureml": "docs/launchers/azureml.md",
    "kubernetes": "docs/launchers/kubernetes.md",
    "local": "docs/launchers.md",
    "mpi": "docs/launchers/mpi.md",
    "sagemaker": "docs/launchers/sagemaker.md",
    "slurm": "docs/launchers/slurm.md",
}
HEAD = "| Key of `launcher.` | By default | |\n|---|---|---|\n"


def node_of(option):
    """The option's settings and their defaults, and the launcher's class."""
    node = yaml.safe_load((ROOT / f"conf/launcher/{option}.yaml").read_text(encoding="utf-8"))
    return node, locate(node.pop("_target_"))


def table(option):
    """Markdown: each key, its default, and what its field says."""
    node, launcher = node_of(option)
    about = launcher.about_settings()
    rows = []
    for key, value in node.items():
        if isinstance(value, dict):
            value = {name: each for name, each in value.items() if each is not None}
        rows.append(row(key, f"`{flow(value)}`", about[key]))
        rows += [row(path, "", about[path]) for path in about if path.startswith(f"{key}.")]
    return HEAD + "".join(rows)


def row(key, default, text):
    text = text.replace("\n", " ").replace("|", "\\|").replace("<", "\\<")
    return f"| `{key}` | {default} | {text} |\n"


def write(option):
    page = ROOT / PAGES[option]
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(HEAD)
    after = rest.partition("\n\n")[2]
    page.write_text(f"{before}{table(option)}\n{after}", encoding="utf-8")


if __name__ == "__main__":
    for name in PAGES:
        if "--write" in sys.argv:
            write(name)
        else:
            print(f"launcher={name}\n\n{table(name)}")
