"""DeepSeek-VL2 on transformers 5, read from the original checkpoint files.

Importing this package registers nothing; ``vlm_adapters.deepseek_vl2.checkpoint.register`` does.
"""
