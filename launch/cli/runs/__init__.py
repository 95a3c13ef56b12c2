"""Commands that prepare, start, monitor and evaluate runs."""
