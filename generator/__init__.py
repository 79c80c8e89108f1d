"""From a spec to the text of a kernel: pure Python and Jinja, without GPU, CUDA, torch or CuPy."""
