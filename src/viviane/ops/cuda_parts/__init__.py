"""What operations in CUDA C++ share; imported by the GPU implementations alone."""
