"""What samples are: a domain's record, views, collate, metric, rows and drawing."""
