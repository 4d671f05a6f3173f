"""Adapters to libraries as users install them: names, layouts, and checks of both.

No source of a library is here and none is built. What an adapter calls it by, and what layouts it
demands, was read in its own releases (`docs/kernels.md` "What was run, and what never").
"""
