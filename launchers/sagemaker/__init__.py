"""launcher=sagemaker: a training job on Amazon SageMaker, by boto3 and an entry point of distdl."""

from distdl.launchers.sagemaker.sagemaker_launcher import SageMakerLauncher

__all__ = ["SageMakerLauncher"]
