"""Example models and the pre-training program; nothing in the library imports them."""
