"""Predicts the memory and time of layouts: enumerates candidates, estimates from shapes, and times compiled steps."""
