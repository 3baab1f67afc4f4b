"""C++ kernels of the model for CPUs, built on first use like those of the numerics."""
