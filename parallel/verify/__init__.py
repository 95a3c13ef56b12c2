"""Agreement with one device, and the first difference."""
