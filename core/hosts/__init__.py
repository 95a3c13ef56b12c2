"""Joining of hosts, heartbeat, diagnosis."""
