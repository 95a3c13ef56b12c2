"""Resolves paths and buckets, retries writes, and reads JSON of other programs."""
