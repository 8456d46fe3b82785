"""Profiling: stage times, recorded traces, and their analysis on the host and the device."""
