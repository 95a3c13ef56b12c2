"""What a compiled step takes on the chips it was compiled for: links, seconds, and how far such figures can be off."""
