"""Monitoring between hosts: progress, lost and hung hosts, diverged replicas, exit codes."""
