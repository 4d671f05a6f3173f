"""Where optional GPU kernels will meet the package; today it holds none.

Planned contents: a registry that maps an operation to its implementations with declared
capabilities, a pure ``select`` that chooses one and an ``explain`` that says why, and two
transports (recorded DLPack callbacks and the XLA foreign function interface). The plain JAX
form of each operation is its reference and stays in ``deepinfer_jax``.

Nothing is exported and ``deepinfer_jax`` does not import this package.
"""
