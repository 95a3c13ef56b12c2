"""Loads published models of images and text for the commands that generate text."""
