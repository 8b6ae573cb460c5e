"""Qwen3-VL for kaminari: dense (2B, 4B, 8B, 32B) and mixture of experts (30B-A3B). Importing it imports nothing heavy."""

__version__ = "0.1.0"
