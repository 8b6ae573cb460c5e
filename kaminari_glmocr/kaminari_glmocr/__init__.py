"""GLM-OCR for kaminari, with its multi-token prediction layer as a draft head. Importing it imports nothing heavy."""

__version__ = "0.1.0"
