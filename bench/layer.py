"""The products of one layer of the released model, for the scripts that time them."""

# name: K, N, how often in a layer, storage in the release
PRODUCTS = {
    "queries down": (5120, 1280, 1, "fp8_block"),
    "queries up": (1280, 32768, 1, "fp8_block"),
    "window": (5120, 512, 1, "fp8_block"),
    "output up": (8192, 5120, 1, "fp8_block"),
    "shared expert up": (5120, 2304, 2, "fp8_block"),
    "shared expert down": (2304, 5120, 1, "fp8_block"),
    "router": (5120, 384, 1, None),
}
# Of one routed expert.
EXPERT = {
    "routed expert up": (5120, 2304, 2, "fp4_group"),
    "routed expert down": (2304, 5120, 1, "fp4_group"),
}
