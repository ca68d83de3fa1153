"""launcher=sagemaker: a training job of Amazon SageMaker, by boto3 and our own entry point."""

from distdl.launchers.sagemaker.sagemaker_launcher import SageMakerLauncher

__all__ = ["SageMakerLauncher"]
