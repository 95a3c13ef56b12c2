"""Loads models of images and text, published or of a run, for the commands that generate text, and exports runs."""
