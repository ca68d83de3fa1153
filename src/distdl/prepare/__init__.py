"""Other people's data sets into ours: ImageNet's tars, folders, TFRecord, Parquet."""
