"""Token shards -> ordered samples -> batches. (forge/prepare makes token shards from text.)

    format.py      opens a dataset folder (docs/data_format.md)
    raw.py, synthetic.py    token files of other programs, and a stream that needs no file
    sources.py     opens any of them by its path
    tokenizer.py   text <-> ids
    mixture.py     global sample number -> whose turn it is, under one mixture
    order.py       global sample number -> which sample of which source, in a history of mixtures and roll-backs
    permutation.py a source's own order in an epoch
    dataset.py     global sample number -> tokens
    loader.py      this data rank's rows of each step, prefetched by a thread, on the device
    build.py       all of it from a config

All are pure functions. The state is the number of the next global sample and, small too, the history of mixtures.
"""
