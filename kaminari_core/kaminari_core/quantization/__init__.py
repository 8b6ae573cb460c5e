"""Weight-only quantization of linear layers: the stored form, how weights get there, and how they are loaded again.

`scheme` is the arithmetic that everything else agrees on; `linear` is the module that computes with it.
"""
