"""What pytest leaves alone here: programs that the tests start."""

collect_ignore = [
    "fit_options.py",
    "key_values.py",
    "networks.py",
    "pitfalls.py",
    "scenarios.py",
    "trials.py",
    "processes.py",
]
