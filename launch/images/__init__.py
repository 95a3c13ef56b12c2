"""Loads models of images and text for generation, and exports runs of them."""
