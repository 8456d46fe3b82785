"""Building blocks of the operations' Numba kernels: memory, numbers of 16 bits, threads."""
