"""Profiles of a run: asking for one while it trains, and reading what they say without a browser."""
