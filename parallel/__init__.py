"""How a model is spread over chips: strategies as tables, bound to devices by a partitioner."""
