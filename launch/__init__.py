"""The composition root: commands, hosts and gin."""
