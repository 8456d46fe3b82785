"""What pytest leaves alone here: programs that the tests start."""

collect_ignore = ["scenarios.py", "processes.py"]
