"""Models that satisfy `core.types.Model`: a decoder-only language model and the Tiny Recursive Model."""
