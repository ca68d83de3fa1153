"""Every key of a config by which it may execute something: a module, class, program, library or
preload. One table, `DOORS`; `_target_` has its own checks (`validation.targets` and `kinds`).

A config may come from somebody else, so the value of such a key counts only if the user says it too
(`distdl.config.own_words`): on the command line or in trust.yaml, and for some keys in `./conf`.
`problems` finds the others. `HARMLESS` names the keys that only look like it, with the reason, so
that a test can ask for each new key on which side it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Door:
    """A key that executes something.

    Args:
        what: What its value is, for messages.
        conf: Whether `./conf` may say it, besides the command line and trust.yaml.
        each: Whether each element of a list, or each value of a mapping, is said by itself.
        keys: Of a mapping whose values are said by themselves: which of its keys matter.
        harmless: Whether a value executes nothing, so that any file may say it.
    """

    what: str
    conf: bool = False
    each: Literal["", "element", "key"] = ""
    keys: Callable[[str], bool] = lambda key: True
    harmless: Callable[[Any], bool] = lambda value: not value


def _default(*values: str) -> Callable[[Any], bool]:
    return lambda value: not value or value in values


# Options of sbatch that only choose where and when a job runs. Others set variables (--export),
# write files (--output) or start containers.
_SBATCH = re.compile(
    r"--(exclusive|mail-type|mail-user|exclude|nodelist|reservation|comment|constraint|licenses"
    r"|nice|priority|begin|deadline|time-min|switches|hint|contiguous|oversubscribe|requeue"
    r"|no-requeue|signal|tmp|threads-per-core|cores-per-socket|mem-per-cpu|mem-per-gpu|mem-bind"
    r"|gpu-bind|distribution|spread-job|wckey|dependency|kill-on-invalid-dep)(=[\w@.,:%+*\[\]-]*)?"
)
# A module of the cluster's own tree: a path names anybody's file, which `module` executes.
_MODULE = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*")


def _all_match(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    def fits(value: object) -> bool:
        listed = value if isinstance(value, list) else [value]
        return all(isinstance(each, str) and pattern.fullmatch(each) for each in listed)

    return lambda value: not value or fits(value)


# Variables that make a program load a library, import a module, start another program, or look for
# any of these, for cached code or for credentials in another place.
_LOADS = re.compile(
    r"""
      (LD|DYLD|BASH|GIT|SSH|SUDO|DOCKER|PIP|UV|CONDA)_.* | GCONV_PATH | GLIBC_TUNABLES
    | PERL5\w+ | RUBY(OPT|LIB) | NODE_(OPTIONS|PATH) | _?JAVA\w*_OPTIONS | KUBECONFIG
    | PATH | HOME | SHELL | ENV | IFS | PS4 | PROMPT_COMMAND | SHELLOPTS | LOCPATH | NLSPATH
    | EDITOR | VISUAL | PAGER | BROWSER | LESSOPEN | LESSCLOSE | NETRC | TERMINFO\w* | INPUTRC
    | TMPDIR | TEMP | TMP | XDG_\w+ | IPYTHONDIR | JUPYTER_\w+ | MPL\w+ | MATPLOTLIB\w+
    | VIRTUAL_ENV
    | PYTHON(?!(UNBUFFERED|FAULTHANDLER|HASHSEED|DONTWRITEBYTECODE|IOENCODING|UTF8|OPTIMIZE|DEVMODE
        |MALLOC|TRACEMALLOC|NODEBUGRANGES|SAFEPATH|VERBOSE)$)\w*
    | TORCH_(?!NCCL_|DISTRIBUTED_|SHOW_|CUDNN_|ALLOW_TF32|FR_|CUDA_ARCH|CPP_LOG|LOGS?$)\w*
    | TORCH(INDUCTOR|DYNAMO)\w* | TRITON\w* | PYTORCH_KERNEL_CACHE_PATH | NUMBA_\w+ | CUPY_\w+
    | (HF|HUGGINGFACE|TRANSFORMERS|DATASETS)_(?!\w*OFFLINE$|HUB_DISABLE|HUB_ENABLE|HUB_VERBOSITY)\w*
    | CUDA_(INJECTION|HOME|PATH|CACHE|ROOT|BIN|LIB)\w* | NVTX_INJECTION\w* | \w*INJECTION64\w*
    | (NCCL|RCCL)_(\w*PLUGIN\w*|CONF_FILE) | UCX_MODULE\w* | FI_PROVIDER_PATH | IBV_DRIVERS
    | (OMPI|PRTE|PMIX|OPAL|ORTE|I_MPI|MPICH|MPIEXEC|HYDRA)_(?!FULL_ERROR$)\w*
    | OMP_TOOL\w* | OPENSSL_\w+ | SSL_CERT\w* | \w*CA_BUNDLE | KRB5\w* | GTK_\w+ | QT_\w+ | GST_\w+
    | (MODULEPATH|LMOD_\w+|SLURM_\w+|SBATCH_\w+|SRUN_\w+|APPTAINER\w+|SINGULARITY\w+|ENROOT_\w+)
    | CC | CXX | CPP | AR | LDSHARED | NVCC\w* | CPATH | LIBRARY_PATH | C\w*_INCLUDE_PATH | NINJA\w*
    | (C|CXX|CPP|LD)FLAGS | CMAKE_\w+ | DS_(?!ACCELERATOR$|SKIP_)\w* | FSSPEC_\w+ | GS_\w+
    | MLFLOW_(?!EXPERIMENT_NAME$|RUN_NAME$|ENABLE_|HTTP_REQUEST|SYSTEM_METRICS)\w*
    | AWS_(?!REGION$|DEFAULT_REGION$)\w+ | AZURE_(CONFIG|EXTENSION|AUTHORITY)\w* | ARM_CLOUD\w*
    | (WANDB|CLEARML|COMET|NEPTUNE)_\w*(URL|HOST|CONFIG|DIR)\w* | DISTDL_\w+
    | \w+_(PRELOAD|PLUGINS?|PLUGIN_PATH|LIBRARY|LIBRARIES|EXECUTABLE|COMMAND|ASKPASS|CACHE|CACHE_DIR
        |CACHE_PATH|CACHE_HOME|MODULE_PATH|PROLOG|EPILOG|HOOKS?)
    """,
    re.VERBOSE,
)


def loads(variable: str) -> bool:
    """Whether a variable of this name makes programs load or execute something."""
    return bool(_LOADS.fullmatch(variable))


# Keys of DeepSpeed's settings that name modules, or where files are written or sent.
DEEPSPEED = {
    "lower_precision_safe_modules": "modules that DeepSpeed imports",
    "compile": "a compiler's backend",
    "checkpoint": "a writer of checkpoints",
    "nebula": "a service that takes the checkpoints",
    "datastates": "a library that writes the checkpoints",
    "wandb": "a server that gets the metrics",
    "comet": "a server that gets the metrics",
    "tensorboard": "a folder that is written",
    "csv_monitor": "a folder that is written",
    "flops_profiler": "a file that is written",
    "autotuning": "programs that DeepSpeed starts",
    "nvme_path": "a folder that is written",
    "sparse_attention": "kernels that are compiled",
    "aio": "an extension that is compiled",
    "hybrid_engine": "an extension that is compiled",
}


def deepspeed_keys(settings: object) -> list[str]:
    """The keys of `DEEPSPEED` that DeepSpeed's settings set, at any depth."""
    if not isinstance(settings, dict):
        return []
    found = [key for key, value in settings.items() if key in DEEPSPEED and value]
    return found + [each for value in settings.values() for each in deepspeed_keys(value)]


def _deepspeed_is_harmless(config: object) -> bool:
    """Whether `strategy.config` (a mapping, or a file of JSON) sets none of them. Of a file that
    cannot be read here it is not known."""
    if not config or isinstance(config, dict):
        return not deepspeed_keys(config)
    try:
        return not deepspeed_keys(json.loads(Path(str(config)).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return False


_OPTIONS = "options of a program"
_IMAGE = "an image whose programs run"
DOORS: Mapping[str, Door] = {
    "project.allow": Door("code outside your project", conf=True, each="element"),
    "project.root": Door("a folder of code that is imported", conf=True),
    "checkpoint.trust_pickle": Door("a checkpoint may run code while it is read"),
    "strategy.config": Door(
        "DeepSpeed's settings that execute or send something",
        conf=True,
        harmless=_deepspeed_is_harmless,
    ),
    "strategy._args_": Door("arguments without names, which no table knows", conf=True),
    "launcher._args_": Door("arguments without names, which no table knows", conf=True),
    # Everywhere: variables of every rank.
    "launcher.env": Door(
        "a variable that makes programs load or execute something",
        conf=True,
        each="key",
        keys=loads,
    ),
    "program.command": Door("a program", conf=True),
    "program.checkpoints": Door("a place that gets the checkpoints", conf=True),
    "program.params": Door("an argument of a program", conf=True, each="key"),
    "launcher.python": Door("a program"),
    # mpi
    "launcher.mpirun": Door("a program", harmless=_default("mpirun")),
    "launcher.ssh": Door("a program", harmless=_default("ssh")),
    "launcher.extra_args": Door(_OPTIONS),
    # slurm
    "launcher.before_srun": Door("shell lines"),
    "launcher.modules": Door("a file that `module` executes", harmless=_all_match(_MODULE)),
    "launcher.sbatch": Door(_OPTIONS, harmless=_all_match(_SBATCH)),
    "launcher.srun_args": Door(_OPTIONS, harmless=_all_match(re.compile("--(label|unbuffered)"))),
    "launcher.container": Door(_IMAGE),
    "launcher.container_mounts": Door("folders that replace those of an image"),
    # azureml, sagemaker
    "launcher.image": Door(_IMAGE),
    "launcher.environment": Door(_IMAGE),
    "launcher.build_context": Door(_IMAGE),
    "launcher.conda_file": Door("packages that are installed"),
    "launcher.docker_args": Door(_OPTIONS),
    "launcher.services": Door("who may log in to the job"),
    # kubernetes
    "launcher.code": Door("a folder of code that is imported"),
    "launcher.volumes": Door("folders that replace those of an image"),
    "launcher.secrets": Door(
        "a variable that makes programs load or execute something", conf=True, each="key"
    ),
    "launcher.runtime": Door(
        "a template whose containers run", harmless=_default("torch-distributed")
    ),
    "launcher.pod_security": Door("more rights of the pods", harmless=_default("restricted")),
    "launcher.ipc_lock": Door("more rights of the pods"),
}

# Keys that look like a program, a library or a path to one, and execute nothing.
HARMLESS: Mapping[str, str] = {
    "*._target_": "checked by validation.targets and validation.kinds, by its own rules",
    "*.num_classes": "a number",
    "*_per_image": "a number",
    "callbacks.*": "arguments of a callback, whose _target_ is checked",
    "checkpoint.resume_from": "a checkpoint, which is read without running code",
    "data.decoder": "one of a list of names",
    "data.root": "a folder that is read",
    "launcher.compute_identity": "a name of Azure's",
    "launcher.container_runtime": "pyxis or apptainer",
    "launcher.description": "a text that a platform shows",
    "launcher.files": "a folder that a dry run writes",
    "launcher.forward_env": "names of variables; their values are the user's own",
    "launcher.hostfile": "a list of hosts, which is read",
    "launcher.identity": "one of a list of names",
    "launcher.mount.*": "sizes and times of Azure's mounts",
    "launcher.network_isolation": "true or false",
    "launcher.priority_class": "a name of the cluster's",
    "launcher.profile": "a section of the user's own ~/.aws/config",
    "launcher.service_account": "a name of the cluster's",
    "launcher.subscription": "a name of Azure's",
    "model.compile": "a mode of torch.compile",
    "model.network": "a node, whose _target_ is checked",
    "model.network.*": "arguments of a network, whose _target_ is checked",
    "model.weights": "a file of weights, which is read without running code",
    "optimizer.trust_coeff": "a number",
    "strategy.comm_hook": "one of a list of names",
    "strategy.hook_start_step": "a number",
    "strategy.reshard_after_forward": "true or false",
    "task.checkpoint": "a checkpoint, which is read without running code",
    "tracking.comet.log_code": "true or false",
    "trainer.profiler": "a name, or a node, whose _target_ is checked",
}


def names(key: str) -> bool:
    """Whether a dotted key is a door, or a key of one that holds a mapping."""
    return any(key == name or key.startswith(f"{name}.") for name in DOORS)


def opened(config: Mapping[Any, Any]) -> Iterator[tuple[str, Any, Door]]:
    """What a config says that executes something: the key, the value as it is written, the door.

    Args:
        config: Plain containers, before interpolations are resolved.
    """
    for key, door in DOORS.items():
        section = config.get(key.partition(".")[0])
        if isinstance(section, str):  # an interpolation: what it leads to is not looked at
            yield key.partition(".")[0], section, door
            continue
        value = _select(config, key)
        if door.each == "element" and isinstance(value, list):
            yield from ((key, element, door) for element in value)
        elif door.each == "key" and isinstance(value, dict):
            yield from ((f"{key}.{k}", v, door) for k, v in value.items() if door.keys(str(k)))
        elif not door.harmless(value):
            yield key, value, door


def _select(config: object, key: str) -> object:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config
