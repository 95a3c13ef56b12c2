"""Models: the decoder and its mixers, test-time training, the recursive model, images and text."""
