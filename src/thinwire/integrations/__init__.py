"""Thinwire inside other people's training loops, a module for each."""
