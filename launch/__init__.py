"""Commands, hosts and gin configuration."""
