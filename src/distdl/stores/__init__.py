"""Places that keep files: a folder, Azure Blob, S3. One small interface for all of them."""
