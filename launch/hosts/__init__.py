"""The hosts of a slice: detects, starts and joins them."""
