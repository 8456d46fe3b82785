"""What pytest leaves alone here: programs that the tests start."""

collect_ignore = ["networks.py", "pitfalls.py", "scenarios.py", "processes.py"]
