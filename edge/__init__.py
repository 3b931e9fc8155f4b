"""edgellm: plans, launches, warms and watches llama.cpp on one machine, and serves it on one address."""

__version__ = "0.1.0"
