"""Errors, devices, seeds and optional imports: the base of all other packages."""
