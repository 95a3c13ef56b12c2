"""Pipelines: layers spread over the mesh axis `stage`, rows sent through them in microbatches."""
