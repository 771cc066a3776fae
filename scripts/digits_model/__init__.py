"""Parts of ``scripts/train_digits_model.py``: tokenizer, architecture, training batches."""
