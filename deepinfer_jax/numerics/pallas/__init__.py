"""The invariant forms of an NVIDIA GPU: Pallas kernels through Triton."""
