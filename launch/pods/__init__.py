"""The hosts of a slice: where this process is, how hosts are started here or through gcloud, and how they join."""
