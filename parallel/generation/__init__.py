"""Tokens from a cache."""
