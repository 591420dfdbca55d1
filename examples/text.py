"""Text, a tokenizer and a configuration that need no download, for `hugging_face.py`."""

import argparse
from pathlib import Path

from transformers import ByT5Tokenizer, LlamaConfig, set_seed

tokenizer = ByT5Tokenizer(extra_ids=0)  # a token per byte: it has no vocabulary file
functions = Path(argparse.__file__).read_text().split("\n    def ")
data = [tokenizer(each, truncation=True, max_length=128) for each in functions]
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
)
set_seed(0)  # random weights, equal in every run; those of from_pretrained are equal anyway
