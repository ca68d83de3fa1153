"""Checks of Kubernetes manifests that its published schemas leave open: the values of enums.

The lists are those of https://kubernetes.io/docs/reference/kubernetes-api/.
"""

import kubernetes_validate
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

VERSIONS = ("1.29", "1.33", "1.37")
# The end of a path -> the values that the API server takes.
ENUMS = {
    "spec.completionMode": {"Indexed", "NonIndexed"},
    "spec.podReplacementPolicy": {"TerminatingOrFailed", "Failed"},
    "rules.action": {"FailJob", "FailIndex", "Ignore", "Count"},
    "onExitCodes.operator": {"In", "NotIn"},
    "onPodConditions.status": {"True", "False", "Unknown"},
    "spec.restartPolicy": {"Never", "OnFailure"},  # of a Job's pods
    "containers.imagePullPolicy": {"Always", "IfNotPresent", "Never"},
    "containers.terminationMessagePolicy": {"File", "FallbackToLogsOnError"},
    "tolerations.operator": {"Exists", "Equal"},
    "tolerations.effect": {"NoSchedule", "PreferNoSchedule", "NoExecute"},
    "emptyDir.medium": {"", "Memory"},
    "seccompProfile.type": {"RuntimeDefault", "Localhost", "Unconfined"},
    "securityContext.fsGroupChangePolicy": {"OnRootMismatch", "Always"},
    "ports.protocol": {"TCP", "UDP", "SCTP"},
}


def check(manifest, versions=VERSIONS):
    """Raises an AssertionError, or what kubernetes-validate raises."""
    wrong = [
        f"{path}: {value!r}"
        for path, value in leaves(manifest)
        for end, known in ENUMS.items()
        if path.endswith(f".{end}") and value not in known
    ]
    assert wrong == []
    if manifest["kind"] != "TrainJob":
        for version in versions:
            kubernetes_validate.validate(manifest, version, strict=True)
        return
    # The model leaves out unknown fields in silence.
    kept = TrainerV1alpha1TrainJob.from_dict(manifest).to_dict()
    assert shape(kept) == shape(manifest)


def leaves(value, path=""):
    """Each text, number or flag, with the keys that lead to it; not the places in lists."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, f"{path}.{key}")
    elif isinstance(value, list):
        for each in value:
            yield from leaves(each, path)
    else:
        yield path, value


def shape(value):
    """A manifest without its values."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return type(value).__name__
