"""Text -> tokens -> ordered samples -> batches.

    corpus.py      text files, JSONL lines and Parquet rows found under the inputs, in a fixed order; parquet.py
    prepare.py     corpus -> tokenizer -> token shards (scripts/prepare_data.py)
    writer.py      writes a dataset folder; format.py opens one (docs/data_format.md)
    tokenizer.py   text <-> ids; train_tokenizer.py makes one (scripts/train_tokenizer.py)
    synthetic.py   a token stream that needs no file
    raw.py, megatron.py    token files that others wrote
    sources.py     opens any of them by its path
    permutation.py, mixture.py    global sample number -> (source, epoch, window), a pure function
    dataset.py     global sample number -> tokens
    loader.py      this data rank's rows of each step, read ahead by a thread, on the device
    build.py       all of it from a config

The only state of the whole way is one integer: the number of the next global sample.
"""
