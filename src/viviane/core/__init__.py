"""Errors, devices, seeds and optional imports: what every other room stands on."""
