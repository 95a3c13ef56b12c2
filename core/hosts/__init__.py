"""Connects the hosts of a run, monitors them, and diagnoses failures."""
