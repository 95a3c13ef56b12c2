"""Measures how layouts agree with one device, and finds the first difference between two runs."""
