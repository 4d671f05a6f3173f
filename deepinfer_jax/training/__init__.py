"""How spark-tiny was made: its corpus, its tokenizer, its training."""
