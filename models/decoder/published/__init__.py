"""Published families: their configurations and tensors."""
