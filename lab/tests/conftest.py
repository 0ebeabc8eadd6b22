"""The fixtures and hooks of tests/support.py."""
from support import *  # noqa: F403
