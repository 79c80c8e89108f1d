"""The CPU engine that runs generated kernels without a GPU."""
