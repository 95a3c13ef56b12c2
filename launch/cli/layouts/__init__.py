"""Layouts: what a strategy does to chips, traffic and numbers."""
