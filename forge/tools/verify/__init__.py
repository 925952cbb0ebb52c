"""Prove that a model, a configuration or a change of the code computes the same under every layout: scripts/verify.py.

    shrink    the configuration, as small as its structure allows, in float64
    layouts   every axis, every pair of axes, then random layouts; the configuration's own checks reject illegal ones
    ranks     functions on real ranks, forked from one warmed process
    borders   the activations at the borders of modules, each with its place in the global batch
    record    the steps of one layout, and of a plain module in one process, with every tensor they compute
    compare   two such records, number by number
    library   another library's parallelism of a plain module, by the same comparison
    explain   the first difference in computation order, and the smallest layout that still shows it
    run       all layouts within a time budget; a failed or hanging layout does not stop the others

The equivalence tests of forge use the same functions.
"""
