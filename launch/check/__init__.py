"""Checks of a run, by level: without a device (preflight), on its hosts (hosts), and by short runs on its slice."""
