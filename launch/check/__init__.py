"""Checks of a run, by level: without a device (preflight), on its hosts (hosts), by short runs on its slice."""
