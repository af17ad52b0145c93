"""A GPU that is not there: PyTorch's CUDA code, on a machine without one."""
