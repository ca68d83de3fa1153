"""`python -m distdl provision azureml`: a workspace for training, with all that it needs."""
