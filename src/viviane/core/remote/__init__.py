"""Object stores and cluster file systems: connections, retries, ranged reads, local copies, publishing."""
