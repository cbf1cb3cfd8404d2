"""The version of Baton: every part says this one."""

__version__ = "0.1.0"
