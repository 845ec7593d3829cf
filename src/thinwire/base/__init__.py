"""Errors, files, schemas, units and checks, without torch."""
