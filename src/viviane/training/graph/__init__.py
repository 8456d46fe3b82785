"""CUDA graphs of training steps: when a step is captured, how, and its replay. A CPU run imports nothing of this."""
