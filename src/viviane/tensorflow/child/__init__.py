"""What programs that a script under `viviane sok` starts find on their path."""
