"""The hosts of a slice: detects where this process runs, starts hosts (simulated or with gcloud), and joins them."""
