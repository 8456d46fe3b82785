"""Doors for users of other libraries: their scripts and files, on Viviane."""
