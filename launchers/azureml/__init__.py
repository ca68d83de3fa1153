"""`launcher=azureml`: a run as an Azure ML command job on AmlCompute or serverless compute."""
