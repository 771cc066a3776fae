"""MolmoE on transformers 5: configuration, processor, model and adapter.

Everything is read from the original checkpoint files.

Importing this package registers nothing; ``vlm_adapters.molmoe.checkpoint.register`` does.
"""
