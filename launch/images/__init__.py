"""Published models of images and text in commands."""
