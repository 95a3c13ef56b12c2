"""Predicts the memory and time of layouts: candidates, estimates from shapes, and the time model of compiled steps."""
