"""Mixers other than usual attention; the mixer with test-time training is in models/ttt/mixer.py."""
