"""Models: the decoder and its mixers, test-time training, the recursive model, and models of images and text."""
