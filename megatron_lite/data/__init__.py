"""Token files, the sample order, the loader and tokenizers; only loader.py imports torch."""
