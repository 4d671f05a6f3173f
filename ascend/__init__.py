"""Where the kernels for Ascend NPUs will live; today it holds none.

Planned contents: the operations of ``kernels_bridge`` implemented on CANN, registered under the
same names and checked by the same tests. CANN and torch-npu are installed by hand, never through
an extra of this project, because an environment with torch-npu but without CANN cannot import
torch.

Nothing is exported and ``deepinfer_jax`` does not import this package.
"""
