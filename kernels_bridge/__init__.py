"""Kernels from outside XLA, as functions of JAX arrays (docs/kernels.md).

What runs where: `registry` (operations as data, `select`, `explain`) over `machine`, a value.
Ways into a compiled program: `handlers` (C++ of our own, built at first use), `dlpack` (libraries
on torch tensors). `ffi` are our kernels for a CPU, which `deepinfer_jax.numerics` calls for
`rows="ffi"`; `ops` are operations that libraries can run, with their meaning in plain JAX, and
`adapters` call the libraries. `calling.call` runs one, `catalogue.OPS` lists them.

Importing any of it needs neither a GPU nor torch.
"""
