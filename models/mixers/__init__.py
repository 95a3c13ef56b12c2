"""Mixers beside attention; test-time training is in models/ttt/mixer.py."""
