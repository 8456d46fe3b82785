"""Benchmarks on this machine: this package and other installed libraries.

Used by `viviane bench` and by the scripts in benchmarks/.
"""
