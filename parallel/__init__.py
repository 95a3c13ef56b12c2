"""Shards a model over chips: strategies as tables, and the partitioner that binds them to devices."""
