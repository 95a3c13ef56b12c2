"""Images beside text: a vision tower, a selector of patches, and a decoder that attends to them."""
