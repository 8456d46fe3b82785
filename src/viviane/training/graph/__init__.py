"""CUDA graphs of training steps: eligibility, capture and replay. A CPU run imports nothing from here."""
