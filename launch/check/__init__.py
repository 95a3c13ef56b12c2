"""Checks of a run: without a device, on its hosts, and by short runs on its slice."""
