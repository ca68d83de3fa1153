"""`python -m distdl provision azureml`: a workspace for training, with all its resources."""
