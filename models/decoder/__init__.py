"""The decoder. Start reading at transformer.py; parts.py defines the parts of its layers."""
