"""Kernels from outside XLA, as functions of JAX arrays.

`ffi`: our own C++ kernels for a CPU, called through XLA's typed foreign function interface and
built by `building` at their first use. `deepinfer_jax.numerics` calls them for `rows="ffi"`; the
plain JAX form of each operation there is its twin, which defines what it means and its gradient.

Kernels for GPUs (FlashMLA, DeepGEMM, DeepEP) are planned and not here.
"""
