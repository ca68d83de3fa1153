"""launcher=sagemaker: a training job on Amazon SageMaker, with boto3 and our own entry point."""

from distdl.launchers.sagemaker.sagemaker_launcher import SageMakerLauncher

__all__ = ["SageMakerLauncher"]
