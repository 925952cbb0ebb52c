"""Verify that a model, a configuration or a code change computes equal numbers under every layout: scripts/verify.py.

    shrink    reduce the configuration to the smallest sizes its structure allows, in float64
    layouts   generate layouts: every axis, every pair of axes, then random ones; skip those the configuration refuses
    ranks     call functions on real ranks, forked from one warmed process
    borders   record module inputs and outputs, with their place in the global batch
    record    run a few steps of one layout and record every tensor
    plain     run the same steps as a plain module in one process: the reference
    compare   compare a recording with the reference, number by number
    library   compare a plain module, parallelised by another library, with the same module in one process
    explain   find the first difference in computation order
    run       check all layouts within a time budget, then reduce the worst one to a smaller layout

The equivalence tests of forge use the same functions.
"""
