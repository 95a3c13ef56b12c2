"""Paths and buckets, retried writes, JSON of other programs."""
