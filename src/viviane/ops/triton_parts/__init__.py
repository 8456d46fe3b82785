"""What the Triton kernels of several operations share; imported by them alone, since it imports Triton."""
