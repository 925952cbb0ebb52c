"""Pretrain dense and mixture-of-experts language models, on a laptop or on thousands of GPUs."""
