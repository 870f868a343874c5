"""Products on the host's cores, with weights where they lie in host memory.

`products` are the operators, `library` builds and loads the kernels of csrc/cpu, `matrix` describes a weight to them.
"""
