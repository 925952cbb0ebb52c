"""Prepare data: text -> tokenizer -> token shards. Not needed for training."""
