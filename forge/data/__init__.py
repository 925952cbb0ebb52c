"""Token shards -> ordered samples -> batches. (forge/prepare makes token shards from text.)

    format.py      opens a dataset folder (docs/data_format.md)
    raw.py, synthetic.py    token files of other programs, and a stream that needs no file
    sources.py     opens any of them by its path
    tokenizer.py   text <-> ids
    permutation.py, mixture.py    global sample number -> (source, epoch, window), a pure function
    dataset.py     global sample number -> tokens
    passed_over.py samples that are skipped after a roll-back
    loader.py      this data rank's rows of each step, prefetched by a thread, on the device
    build.py       all of it from a config

The only state is one integer: the number of the next global sample.
"""
