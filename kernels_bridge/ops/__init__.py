"""Operations that kernels of other libraries can run: rules, twins, implementations."""
