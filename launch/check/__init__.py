"""Checks of a run: without a device (preflight), on its hosts (doctor), and by short runs on the slice (validate)."""
