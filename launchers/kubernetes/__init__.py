"""launcher=kubernetes: an Indexed Job or a Kubeflow TrainJob, by the official client."""

from distdl.launchers.kubernetes.kubernetes_launcher import KubernetesLauncher

__all__ = ["KubernetesLauncher"]
