"""Families of published models: a module for each, which `models.decoder.published.families` finds by its file."""
