"""Token shards -> ordered samples -> batches.

(forge/tools/prepare makes token shards from text.)

    format.py      opens a dataset folder (docs/reference/data-format.md)
    raw.py, synthetic.py    token files of other programs, and a stream without a file
    sources.py     opens any of them by path
    array.py, cache.py      arrays in local and remote files, and a disk cache of remote blocks
    tokenizer.py   text <-> ids
    mixture.py     global sample number -> source, under one mixture
    order.py       global sample number -> source and its sample, in a history of mixtures and roll-backs
    permutation.py the order of a source in an epoch
    windows.py, packing.py  division of a source into samples
    dataset.py     global sample number -> tokens
    read_ahead.py  the same for many samples at once, if reads wait for a store
    loader.py      this data rank's rows of each step, prefetched by a thread, on the device
    held_out.py    batches of held-out sources
    build.py       all of it from a config

All are pure functions. The only state is the number of the next global sample and the short history of mixtures.
"""
