"""Token shards -> ordered samples -> batches.

(forge/tools/prepare makes token shards from text.)

    format.py      opens a dataset folder (docs/reference/data-format.md)
    raw.py, synthetic.py    token files of other programs, and a generated stream
    sources.py     opens any kind of source by path
    array.py, cache.py      arrays in local and remote files, and a disk cache of remote blocks
    tokenizer.py   text <-> ids
    order.py       global sample number -> source and the source's sample, over successive mixtures and roll-backs
    permutation.py the order of a source in an epoch
    packing.py     packing plans: whole documents in sequences of one length
    dataset.py     division of a source into samples, and global sample number -> tokens
    read_ahead.py  reads many samples at once, if reads wait for a remote store
    loader.py      this data rank's rows of each step: prefetched by a thread, copied to the device
    held_out.py    batches of held-out sources
    build.py       builds all of these from a config

A sample is a pure function of its number. The only state is the number of the next global sample and the short list of
mixtures and roll-backs.
"""
