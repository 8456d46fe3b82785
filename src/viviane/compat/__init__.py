"""Compatibility with other libraries: their scripts and files run on Viviane."""
