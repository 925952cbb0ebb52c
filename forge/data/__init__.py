"""Token shards -> ordered samples -> batches. (forge/tools/prepare makes token shards from text.)

    format.py      opens a dataset folder (docs/data_format.md)
    raw.py, synthetic.py    token files of other programs, and a stream that needs no file
    sources.py     opens any of them by its path
    array.py, cache.py      arrays in local and remote files, and the blocks of remote ones on this machine's disk
    tokenizer.py   text <-> ids
    mixture.py     global sample number -> whose turn it is, under one mixture
    order.py       global sample number -> which sample of which source, in a history of mixtures and roll-backs
    permutation.py a source's own order in an epoch
    windows.py, packing.py  how a source is cut into samples
    dataset.py     global sample number -> tokens
    read_ahead.py  the same for many samples at once, where reading waits for a store
    loader.py      this data rank's rows of each step, prefetched by a thread, on the device
    held_out.py    batches of held-out sources
    build.py       all of it from a config

All are pure functions. The state is the number of the next global sample and, small too, the history of mixtures.
"""
