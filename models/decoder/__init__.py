"""The decoder: start at transformer.py; the parts of its layers at parts.py."""
