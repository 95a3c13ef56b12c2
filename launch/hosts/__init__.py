"""The hosts of a slice: finding out where this process runs, starting hosts (simulated or by gcloud), joining them."""
