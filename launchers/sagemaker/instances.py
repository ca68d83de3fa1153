"""What is known of an instance type, from `instance_types.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Instance:
    """One size. `network` is in Gbit/s, `memory` in GiB; 0 where it is not in the file."""

    name: str
    gpus: int = 0
    gpu: str = ""
    cpus: int = 0
    memory: int = 0
    network: int = 0
    efa: bool = False


@cache
def known() -> dict[str, Instance]:
    """Name -> instance, as far as the file goes."""
    import yaml

    facts = yaml.safe_load((Path(__file__).parent / "instance_types.yaml").read_text())
    with_gpu = {name: Instance(name, **fields) for name, fields in facts["gpu"].items()}
    names = [f"ml.{family}.{size}" for family, sizes in facts["cpu"].items() for size in sizes]
    return {**with_gpu, **{name: Instance(name) for name in names}}


def is_newer_than_the_file(name: str) -> bool:
    """Whether the installed boto3 knows a type that the file does not."""
    try:
        from botocore.session import Session
    except ImportError:
        return False
    model = Session().get_service_model("sagemaker")
    return name in model.shape_for("TrainingInstanceType").enum
