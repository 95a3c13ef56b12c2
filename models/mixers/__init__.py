"""Mixers for decoder layers: block-sparse attention, latent attention, the gated delta rule, and S5."""
