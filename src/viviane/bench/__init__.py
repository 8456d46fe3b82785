"""Measure this machine: our operations beside the libraries that are installed on it.

`viviane bench` is its command, and the scripts in benchmarks/ take their workloads, peers and clocks from here.
"""
