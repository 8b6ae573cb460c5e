"""The HTTP server of kaminari: OpenAI-compatible chat completions, native routes, metrics. It comes as a plugin."""

__version__ = "0.1.0"
