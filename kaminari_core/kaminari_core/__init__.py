"""kaminari_core: what every vision-language model shares, and the hooks through which models, caches, schedulers,
quantizers, commands and routes are added. Importing it imports nothing heavy."""

__version__ = "0.1.0"
