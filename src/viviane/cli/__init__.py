"""The command `viviane`."""
