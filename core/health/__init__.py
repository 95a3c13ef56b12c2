"""Hosts that watch one another: where each is, when one is lost or stuck, and how all of them end."""
