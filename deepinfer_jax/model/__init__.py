"""The model: one idea per file, pure functions; `forward` joins them."""
