"""Commands, hosts and gin configuration: what combines models, tasks, layouts and the training loop into runs."""
