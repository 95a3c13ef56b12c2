"""Haiku models. They name the axes of their arrays and know nothing of meshes."""
