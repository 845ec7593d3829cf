"""Saves: what is in them, and how they get onto the disk whole."""
