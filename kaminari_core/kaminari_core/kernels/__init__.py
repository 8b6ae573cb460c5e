"""The kernels of this package for CPUs: C++ that is compiled on first use, and what they replace in a model.

`library` compiles and loads them, `operators` is how Python calls them, `adoption` puts them into a loaded model. Nothing here is
needed: where there is no compiler, or another processor, the same layers run through torch.
"""
